"""Options that several commands share, with llama.cpp's names; the sections of --help."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Final

import click
from click.types import StringParamType

from ggufspec.cli import llama_lines, render
from ggufspec.cli.loading import PairOptions
from ggufspec.cli.parameters import PATH, Command, Option, OrWord, gathered, option
from ggufspec.common import defaults
from ggufspec.decoding.sampling_options import NUMBERS
from ggufspec.engine.load_options import OPTIONS

# The sections of --help-all in order, each with the names of its parameters in order; --help lists
# those before the bar. The other options of `load` have a section in their table. An option that is
# in no section is in the last one, and in --help.
_SECTIONS: Final = {
    "Options": "preset target draft prompt prompt_file output vram port vocab layers type_ texts",
    "Models": "| models models_dir keep_alive models_ram models_max offline yes size cache_dir",
    "Server": "host api_key alias n_slots embeddings "
    "| api_key_file cors_origins slot_folder suffix_first pooling allow_remote_images",
    "Prompt": "limit chat system images | n_prompts",
    "Text": "max_tokens n_tokens stop | ignore_eos reasoning_budget context_shift n_keep",
    "Sampling": "temperature temperatures top_k top_p seed "
    f"| {' '.join(NUMBERS)} dry_sequence_breakers logit_bias banned_strings samplers",
    "Constraints": "json_schema | json_schema_file grammar grammar_file regex regex_file choices",
    "Drafting": "n_draft lengths | tree trees drafter prediction drafters "
    "verify rules draft_temperature acceptance",
    "Devices and memory": "n_ctx n_gpu_layers n_gpu_layers_draft n_threads ram gpu_bandwidth "
    "ram_bandwidth | prompt_cache prompt_cache_ro",
    "Processes": "n_workers address | n_gpus",
    "Limits": "n_waiting_max timeout | n_tokens_max n_body_bytes grace n_retries",
    "Measurement": "n_runs runs depth n_most alpha forgets against compare "
    "| near_tie n_warm_up llama_bin",
    "Output": "json_path resume plot_path record speed as_json verbose | retry_failed form color",
}
_USUAL: Final = " ".join(names.partition("|")[0] for names in _SECTIONS.values()).split()
_LISTED: Final = " ".join(names.partition("|")[2] for names in _SECTIONS.values()).split()
_RARE: Final = {*_LISTED, *OPTIONS} - {*_USUAL}
_NUMBERS = {"INTEGER RANGE": "N", "FLOAT RANGE": "X", "INTEGER": "N", "FLOAT": "X"}
_SHORTER: Final = {**_NUMBERS, "N|AUTO": "N|auto"}
_FEW, _MOST = 12, 25  # options without sections, and at once
_ALL: Final = f"{__name__}.all"  # in a context: its help is that of --help-all


def _none(context: click.Context, option: click.Parameter, value: int) -> int | None:
    return None if value == -1 else value


max_tokens_option = option(
    "-n --n-predict max_tokens | --predict $LLAMA_ARG_N_PREDICT",
    "Maximum tokens to generate; -1: until the model stops or the context is full. 0: only process "
    "the prompt; -2: as -1, without --context-shift.",
    type=click.IntRange(min=-2),
    default=-1,
    callback=_none,
)
seed_option = option(
    "-s --seed",
    "Seed of the random numbers; -1: a random one.",
    type=click.IntRange(min=-1),
    default=-1,
    callback=_none,
)


class _WholeText(StringParamType):
    """A text that may contain spaces, also in a variable."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


def _last(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> str | None:
    context.meta["targets"] = given
    return given[-1] if given else None


# A target that may be given several times; the command gets the last, all are in the context.
SEVERAL_TARGETS: Final[dict[str, Any]] = {"multiple": True, "type": _WholeText(), "callback": _last}


def target_option(*, required: bool = True, **settings: Any) -> Option:
    """The option for the target: a file, or a name that `cli.loading` resolves."""
    return option(
        "-m --target | --model $LLAMA_ARG_MODEL",
        "Target: a GGUF file, user/repo or a name. Also user/repo:QUANT and user/repo/file.gguf; "
        "`ggufspec models list` lists the names.",
        required=required,
        metavar="MODEL",
        **settings,
    )


def draft_option(without: str = "", *, required: bool = False) -> Option:
    """The option for the draft: a file, or a name. `without`: a sentence on leaving it out."""
    return option(
        "-md --draft | --spec-draft-model --model-draft $LLAMA_ARG_SPEC_DRAFT_MODEL",
        "Draft: a file or name of a small model or of a head, or auto. Heads: MTP, DFlash, "
        "EAGLE-3; mtp: the head in the target's own file; auto: chosen to fit the target. "
        f"{without}".rstrip(),
        required=required,
        metavar="MODEL",
    )


LOOKUP = "Without a draft, only n-gram lookup drafts."
SEVERAL = "Several drafts (a.gguf,b.gguf) are measured one after the other, and ranked."

offline_option = option(
    "--offline $LLAMA_ARG_OFFLINE",
    "Use only models on this machine; download nothing.  [default: HF_HUB_OFFLINE]",
    is_flag=True,
)

size_option = option(
    "--size", "Size of the stand-in target, in parameters: 10M to 8B.", default=defaults.DEMO_SIZE
)

cache_dir_option = option(
    "--cache-dir",
    "Folder for the stand-in.  [default: GGUFSPEC_CACHE, or the user's cache folder]",
    type=PATH,
)


def pair_of(*options: Option) -> Callable[[Command], Command]:
    return gathered("pair", *options, make=PairOptions)


yes_option = option("--yes", "Download what --draft auto proposes without asking.", is_flag=True)
pair_options = pair_of(target_option(), draft_option(LOOKUP), offline_option, yes_option)


def pair_or_embedded_options(
    without: str = LOOKUP, **of_target: Any
) -> Callable[[Command], Command]:
    """The options of a pair; without a target, the embedded pair. `without`: see draft_option."""
    named = (
        target_option(required=False, **of_target),
        draft_option(without),
        offline_option,
        yes_option,
    )
    return pair_of(*named, size_option, cache_dir_option)


DRAFT_LENGTH = OrWord(click.IntRange(1, defaults.N_DRAFT_LIMIT))


def draft_n_option_of(default: int | str, help_text: str) -> Option:
    return option("--draft-n n_draft", help_text, type=DRAFT_LENGTH, default=default)


TREE = click.Choice(defaults.TREES)
DRAFTING = (
    draft_n_option_of(
        defaults.N_DRAFT,
        "Draft length: tokens drafted per round, or auto. auto: the length with the highest "
        "expected tokens/s; 0 if drafting would not be faster.",
    ),
    option(
        "--tree",
        "Branches in a draft: several continuations, verified together; auto: when measured costs "
        "predict a gain; on: the --draft-n most likely nodes; off: chains only.",
        type=TREE,
        default=defaults.TREE,
    ),
    option(
        "--drafter",
        "Drafting strategy: model, staged (the model, with its own tokens drafted by lookup), "
        "ngram (lookup in the text so far, without a model), "
        "auto (picks the faster one each round), forced (only tokens that a constraint leaves no "
        "alternative to; the others draft them, too) or none.  [default: auto; if --draft-n is a "
        "number: model]",
    ),
    option(
        "--verify",
        "Verification rule: traversal (whole paths at once), rejection (token by token) or match "
        "(only equal tokens, as in llama.cpp). The text has the target's distribution with each.",
        default=defaults.VERIFY,
    ),
    option(
        "--draft-temp draft_temperature",
        "Temperature of the draft; 0: greedy. The text keeps the target's distribution at any "
        "value.  [default: the target's; with --verify match 0]",
        type=click.FLOAT,
    ),
)


def system_option_of(help_text: str) -> Option:
    return option("-sys --system | --system-prompt", help_text)


prompt_options = gathered(
    "asked",
    option("-p --prompt", "Prompt text.  [default: read from stdin]"),
    option("-f --file prompt_file", "Read the prompt from a file.", type=PATH),
    option("--chat", "Apply the target's chat template, so that the model answers.", is_flag=True),
    system_option_of("System message; implies --chat."),
)

stop_option = option(
    "--stop | -r --reverse-prompt",
    "End before this string. May be given several times.",
    multiple=True,
)

LIMITS = (
    option(
        "--reasoning-budget $LLAMA_ARG_THINK_BUDGET",
        "Maximum number of tokens of reasoning, after which its end is forced; 0: it ends at once; "
        "-1: no limit.",
        type=click.IntRange(min=-1),
        default=-1,
    ),
    option(
        "--context-shift/--no-context-shift $LLAMA_ARG_CONTEXT_SHIFT",
        "When the context is full, drop the older half of the text and continue. Not for texts "
        "with a constraint.",
        default=False,
        show_default=False,
    ),
    option(
        "--keep n_keep",
        "Number of first tokens that --context-shift keeps; -1: the whole prompt.",
        type=click.IntRange(min=-1),
        default=0,
    ),
)

ignore_eos_option = option("--ignore-eos", "Never sample the tokens that end a text.", is_flag=True)

color_option = option(
    "--color | -co",
    "Show accepted draft tokens in green.",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
)

json_option = option("--json as_json", "Print one JSON document instead.", is_flag=True)


def _show_log(context: click.Context, option: click.Parameter, verbose: bool) -> bool:
    if verbose:
        from ggufspec.llama import log

        log.show_log()
    return verbose


def verbose_option_of(help_text: str, **settings: Any) -> Option:
    """The option -v, which lets llama.cpp's log through to stderr."""
    return option(
        "-v --verbose | --log-verbose", help_text, is_flag=True, callback=_show_log, **settings
    )


_LOG = "Show llama.cpp's log on stderr."
verbose_option = verbose_option_of(_LOG)
log_option = verbose_option_of(_LOG, expose_value=False)  # for commands that print no more
explaining_option = verbose_option_of(
    "Show on stderr why each round had its draft length, where the time went, and llama.cpp's log."
)


class SectionedCommand(click.Command):
    """Its --help lists the usual options, with a sentence each; --help-all lists all, in groups."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if sum(not getattr(each, "hidden", True) for each in self.params) > _MOST:
            self.params.append(_all_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads llama.cpp's options, too, if the command loads models."""
        if any("--model" in each.opts for each in self.params) and not ctx.resilient_parsing:
            args, without_effect = llama_lines.translated(self, args)
            if without_effect and "arguments" not in ctx.meta:
                render.note(without_effect)
            ctx.meta.setdefault("arguments", list(args))  # that a process of its own may get, too
            ctx.meta["latest"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {}  # a flag may set another option's value
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue  # already in the usage line; some versions of click return an empty record
            if parameter.name and (record := parameter.get_help_record(ctx)) is not None:
                records.setdefault(parameter.name, []).append((_shortened(record[0]), record[1]))
        sections = {title: names.replace("|", "").split() for title, names in _SECTIONS.items()}
        for name, each in OPTIONS.items():
            sections[each.section].append(name)
        if "help_all" in records and not ctx.meta.get(_ALL):
            records = {
                name: [(names, _first_sentence(text)) for names, text in records[name]]
                for name in (*_USUAL, *records)
                if name in records and name not in _RARE
            }
            sections = {"Options": [*records]}
        elif len(records) <= _FEW:
            sections = {"Options": []}
        for title, names in sections.items():
            shown = [records.pop(name) for name in names if name in records]
            if title == [*sections][-1]:
                shown += records.values()
            if shown:
                with formatter.section(title):
                    formatter.write_dl([*chain(*shown)])


def _first_sentence(text: str) -> str:
    """The text up to its first sentence, and its default."""
    said, bracket, default = text.partition("  [")
    return said.partition(". ")[0].rstrip(".") + "." + bracket + default


def _all_option() -> click.Option:
    def show(context: click.Context, option: click.Parameter, given: bool) -> None:
        if given and not context.resilient_parsing:
            context.meta[_ALL] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    text = "Show all options, in groups, and exit."
    how: Any = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": show}
    return click.Option(["--help-all"], help=text, **how)


class SectionedGroup(click.Group, SectionedCommand):
    command_class = SectionedCommand


def _shortened(usage: str) -> str:
    for long, short in _SHORTER.items():
        usage = usage.replace(long, short)
    return usage
