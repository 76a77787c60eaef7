"""The options that name a pair; the sections of --help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

import click

from ggufspec.cli import llama_lines, render
from ggufspec.cli.loading import PairOptions
from ggufspec.cli.options import TABLE, Command, gathered, options, parameter_of
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
LOOKUP = "Without a draft, only n-gram lookup drafts."
LOG: Final[Mapping[str, Any]] = {"expose_value": False}  # for commands that print no more
SEVERAL = "Several drafts (a.gguf,b.gguf) are measured one after the other, and ranked."


def pair_options(*names: str, **changed: Mapping[str, Any]) -> Callable[[Command], Command]:
    """The options that name a pair, or those of these names, as `pair`."""
    return gathered("pair", *options("pair", *names, **changed), make=PairOptions)


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
        for spelled, row in TABLE["load"].items():
            sections[row.get("section", "Devices and memory")].append(parameter_of(spelled))
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
