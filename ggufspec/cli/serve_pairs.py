"""Several pairs for `ggufspec serve`: their names and options, and what is known before loading."""

from __future__ import annotations

import configparser
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ggufspec.cli import render
from ggufspec.cli.loading import AUTO_DRAFT, PairOptions, room_for_drafts, wants_projector
from ggufspec.cli.options import TABLE, parameter_of
from ggufspec.common import child, validate
from ggufspec.common.facts import json_object
from ggufspec.common.reading import TOMLDecodeError, parse_toml, read_text
from ggufspec.engine.load_options import OPTIONS
from ggufspec.errors import GgufspecError, ModelError, OptionError
from ggufspec.models.draft_proposal import proposals
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import read_header
from ggufspec.models.heads import is_head
from ggufspec.models.local import models_in

if TYPE_CHECKING:
    from ggufspec.server.pairs import Pairs

ROUTER = tuple(map(parameter_of, TABLE["several"]))  # its options
_IN_FRONT = ("host", "port", "api_key", "api_key_file", "cors_origins", "grace", "alias")
_MODELS = ("target", "draft")
_PROCESS_BYTES = 256 * 2**20  # besides what is predicted: an interpreter with its libraries
_GPU_BYTES = 512 * 2**20  # of a process that uses a GPU
_CACHE_SHARE, _CACHE_MOST = 16, 8192  # of memory for --cache-ram; MiB
_TRUE, _FALSE = ("true", "on", "yes", "1", "enabled"), ("false", "off", "no", "0", "disabled")

Options = Mapping[str, Any]


def named_pairs(context: click.Context) -> dict[str, list[str]] | None:
    """The command line of each pair's process, without an address; None: one pair is served.

    Raises GgufspecError, UsageError.
    """
    given, targets = context.params, context.meta["targets"]
    file, folder = given["models"], given["models_dir"]
    if not (file or folder or len(targets) > 1):
        for name in ROUTER:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                option = name.replace("_", "-")
                raise click.UsageError(f"--{option} needs several models: see --models")
        return None
    common = _given(context, context.meta["arguments"], (*ROUTER, *_IN_FRONT, *_MODELS))
    draft = given["draft"]
    if draft not in (None, AUTO_DRAFT, MTP):
        raise click.UsageError("--draft must be auto or mtp here: name the others in --models")
    found: dict[str, list[str]] = {}
    shared = [] if draft is None else ["--draft", draft]
    for name, words in (
        *(_in_file(context.command, file) if file else ()),
        *(_in_folder(folder) if folder else ()),
        *((Path(target).stem, ["--model", target, *shared]) for target in targets),
    ):
        if name in found:
            raise OptionError(f"two models are named {name}; name them in --models")
        found[name] = _line(context, name, [*common, *words])
    if not found:
        raise OptionError(f"there are no models in {folder or file}")
    return found


def _line(context: click.Context, name: str, words: list[str]) -> list[str]:
    """The options of a pair, with the files of its models, which are found first."""
    try:
        own = context.command.make_context("serve", list(words), parent=context)
        pair = PairOptions(
            **{key: own.params[key] for key in ("target", "draft", "offline", "yes")}
        )
        if pair.target is None:
            raise click.UsageError("it has no target")
        reads = not own.params["embeddings"] and wants_projector(own.params)
        target, draft = pair.find(projector=reads)
        options = _given(own, own.meta["latest"], (*ROUTER, *_IN_FRONT, *_MODELS))
    except click.UsageError as error:
        raise OptionError(f"{name}: {error.format_message()}") from error
    models = ["--model", str(target), *(["--draft", str(draft)] if draft else [])]
    return [*options, *models, "--alias", name]


def _given(context: click.Context, words: Sequence[str], without: Sequence[str]) -> list[str]:
    """The options of a command line, each in its usual spelling."""
    values, _, order = context.command.make_parser(context).parse_args(list(words))
    found: list[str] = []
    for name, each in {option.name: option for option in order}.items():
        if name not in without and isinstance(each, click.Option) and name is not None:
            found += _words(each, values[name])
    return found


def _words(option: click.Option, value: Any) -> list[str]:
    name = max(option.opts, key=len)
    if option.is_flag:
        return [name if value else max(option.secondary_opts, key=len, default=name)]
    return [word for each in (value if option.multiple else [value]) for word in (name, str(each))]


def _in_file(command: click.Command, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the pairs of a TOML file, or of one of llama-server's presets (INI)."""
    text, common = read_text(path, "the file of models", OptionError), {}
    try:
        if path.suffix == ".ini":
            parser = configparser.ConfigParser(default_section="*", interpolation=None)
            parser.read_string("[*]\n" + text)
            tables: dict[str, Options] = {name: parser[name] for name in parser.sections()}
        else:
            tables = parse_toml(text)
            common = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    except (TOMLDecodeError, configparser.Error) as error:
        raise OptionError(f"the file of models {path} cannot be read: {error}") from error
    by_key: dict[str, tuple[str, click.Option]] = {}
    for each in command.params:
        if isinstance(each, click.Option) and each.name is not None:
            by_key[each.name.replace("_", "-")] = (max(each.opts, key=len), each)
            for name in (*each.opts, *each.secondary_opts):
                # Not --slots, which is a flag in llama.cpp: `--slots 1` would have no effect.
                spelled = name if each.is_flag else max(each.opts, key=len)
                by_key[name.lstrip("-")] = (spelled, each)
    for name in [each for each in tables if each not in common]:
        words: list[str] = []
        for key, value in ({**common, **tables[name]}).items():
            if key not in ("version", "load-on-startup", "stop-timeout"):  # of presets
                words += _option(by_key, key, value, path.parent)
        yield name, words


def _option(
    by_key: Mapping[str, tuple[str, click.Option]], key: str, value: Any, folder: Path
) -> list[str]:
    """The words of an option in a file; paths are relative to its folder."""
    spelled, option = by_key.get(key.replace("_", "-"), (f"--{key.replace('_', '-')}", None))
    text = str(value)
    if option is not None and option.is_flag:
        if text.lower() in _TRUE:
            return [spelled]
        if text.lower() not in _FALSE:
            raise OptionError(f"{key} is {text!r}; it must be true or false")
        return option.secondary_opts[:1] if spelled in option.opts else option.opts[:1]
    if option is not None and option.multiple and isinstance(value, list):
        return [word for each in value for word in _option(by_key, key, each, folder)]
    if isinstance(value, list):
        text = ",".join(map(str, value))
    elif isinstance(value, dict):
        text = json.dumps(value)
    elif option is None or option.name in _MODELS or isinstance(option.type, click.Path):
        text = str(folder / text) if (folder / text).exists() else text
    return [spelled, text]


def _in_folder(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the models in a folder and below, each with the head or draft that is beside it."""
    if not folder.is_dir():
        raise OptionError(f"--models-dir {folder} is no folder")
    for files in sorted(models_in(folder, "**/*")):
        path = files[0]
        try:
            header = read_header(path)
            if is_head(header) or header.values.get("general.type", "model") != "model":
                continue
            found = (each.name for each in proposals(str(path), offline=True))
            beside = (name for name in found if name == MTP or path.parent in Path(name).parents)
            draft = next(beside, None)
        except ModelError as error:
            render.note(f"{path.name} is left out: {error}")
            continue
        if header.tensors:
            name = path.stem.partition("-00001-of-")[0]
            yield name, ["--model", str(path), *(["--draft", draft] if draft else [])]


@contextmanager
def opened_pairs(
    lines: Mapping[str, Sequence[str]], given: Mapping[str, Any], slot_folder: Path | None
) -> Iterator[Pairs]:
    """The pairs with what is known of them; at the end, their processes end. Raises OptionError."""
    from ggufspec.server.dialects.ollama import ModelFacts
    from ggufspec.server.pairs import Memory, PairPlan, Pairs

    asked = json.dumps({"lines": lines, "models_ram": given["models_ram"]})
    done = child.call(__name__, "print_facts", asked, is_limited=False)
    found = json_object(done.stdout.decode("utf-8", "replace"))
    if found is None:
        raise OptionError(f"the models cannot be read: {done.stderr.decode(errors='replace')}")
    plans = []
    for name, facts in found["pairs"].items():
        if isinstance(facts, str):
            raise OptionError(f"{name}: {facts}")
        plans.append(
            PairPlan(
                name,
                [*lines[name], *facts["words"]],
                Memory(*facts["memory"]),
                ModelFacts(**facts["facts"]),
                facts["described"],
                facts["n_slots"],
                slot_folder,
            )
        )
    with tempfile.TemporaryDirectory(prefix="ggufspec-") as folder:
        pairs = Pairs(
            plans,
            Memory(*found["room"]),
            n_most=given["models_max"],
            keep_alive=validate.duration("--keep-alive", given["keep_alive"]),
            folder=Path(folder),
            tell=lambda name, line: render.echo(
                f"{name}: {line.removeprefix('ggufspec: ')}", err=True
            ),
        )
        try:
            yield pairs
        finally:
            pairs.close()


def print_facts(asked: str) -> None:
    """In a process of its own, which looks for GPUs: print what is known of pairs, as JSON."""
    from ggufspec.cli.serve import command
    from ggufspec.llama.devices import free_memory, gpus

    request, devices = json.loads(asked), gpus()
    n_host = free_memory() if request["models_ram"] is None else request["models_ram"] * 2**20
    n_host = sys.maxsize if n_host is None else n_host
    room = (sum(gpu.n_free for gpu in devices if not gpu.is_shared), n_host)
    pairs: dict[str, Any] = {}
    for name, words in request["lines"].items():
        try:
            context = command.make_context("serve", list(words))
            pairs[name] = _facts(context.params, room, [gpu.is_shared for gpu in devices])
        except GgufspecError as error:
            pairs[name] = str(error)
        except click.ClickException as error:
            pairs[name] = error.format_message()
    sys.stdout.write(json.dumps({"room": room, "pairs": pairs}))


def _facts(given: dict[str, Any], room: tuple[int, int], are_shared: list[bool]) -> dict[str, Any]:
    """What is known of a pair from its files, and the memory that it will take."""
    from ggufspec.engine.fit import Fit
    from ggufspec.engine.load_options import LoadOptions

    header, draft = read_header(Path(given["target"])), given["draft"]
    n_gpu, n_host, n_ctx, more = 0, header.n_bytes, given["n_ctx"] or header.n_ctx, list[str]()
    projector = None
    if not given["embeddings"]:
        options = {name: given[name] for name in OPTIONS if name in given}
        options |= room_for_drafts(given["n_draft"])
        draft_file = Path(draft) if draft and draft != MTP else draft
        checked = LoadOptions.of(given["target"], draft_file, options)
        projector = checked.projector
        plan = Fit(checked).alone(room[1])
        if (cache_ram := given["cache_ram"]) is None:
            cache_ram = min(room[1] // _CACHE_SHARE // 2**20, _CACHE_MOST)
        n_ctx = plan.caches.n_ctx
        more = ["--cache-ram", str(cache_ram), "--ctx-size", str(n_ctx)]
        on_gpus = list(zip(plan.gpu_bytes, are_shared, strict=False))
        n_gpu = sum(n for n, is_shared in on_gpus if not is_shared)
        n_host = plan.host_bytes + sum(n for n, is_shared in on_gpus if is_shared)
        n_host += cache_ram * 2**20
    template = given["chat_template"] or header.values.get("tokenizer.chat_template", "")
    has = {"tools": "tools" in template, "thinking": "think" in template, "vision": projector}
    return {
        "words": more,
        # A pair alone may use all of a GPU.
        "memory": (min(n_gpu + _GPU_BYTES, room[0]) if n_gpu else 0, n_host + _PROCESS_BYTES),
        "n_slots": given["n_slots"],
        "facts": {
            "family": header.architecture,
            "quantization": header.quantization,
            "n_params": header.n_params,
            "n_bytes": header.n_bytes,
            "n_ctx": n_ctx,
            "template": template,
            "abilities": [name for name, found in has.items() if found],
        },
        "described": {
            "max_model_len": n_ctx,
            "ggufspec": {
                "chat": bool(template),
                "draft": draft is not None,
                "images": projector is not None,
                "n_ctx": n_ctx,
                "n_vocab": header.n_vocab,
            },
        },
    }
