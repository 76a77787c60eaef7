"""The experiments that the project started from: models, prompts, settings, published results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.bench import preset_tables
from ggufspec.bench.contenders import contenders
from ggufspec.bench.prompts import own_prompts
from ggufspec.bench.records import BenchResults, Contender
from ggufspec.bench.run import Experiment
from ggufspec.bench.tables import Table
from ggufspec.common.prompts import Prompt
from ggufspec.common.toml import read_toml

_SOURCES = read_toml(Path(__file__).with_suffix(".toml"))
_NO_TRUNCATION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class PresetPair:
    """Registered names of two models, and their names in the source's table."""

    target: str
    draft: str
    target_label: str
    draft_label: str


@dataclass(frozen=True)
class Preset:
    """A known experiment. `load`: settings of ggufspec.load; `tables`: renders its results."""

    name: str
    about: str
    pairs: Sequence[PresetPair]
    experiment: Experiment
    tables: Callable[[BenchResults], list[Table]] = preset_tables.general
    load: Mapping[str, Any] = field(default_factory=dict)
    published: Sequence[Table] = ()


def _compared(
    temperature: float, lengths: Sequence[int | str], **options: Any
) -> Sequence[Contender]:
    return contenders(lengths=lengths, temperatures=[temperature], sampling=options, has_draft=True)


def _from_source(
    name: str,
    contenders: Sequence[Contender],
    tables: Callable[[BenchResults], list[Table]],
    load: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Preset:
    source = _SOURCES[name]
    prompts = [
        Prompt(id=each["id"], turns=(each["text"],), system=each.get("system"))
        for each in source["prompts"]
    ]
    return Preset(
        name=name,
        about=source["about"],
        pairs=[PresetPair(*names) for names in source["pairs"]],
        experiment=Experiment(contenders, prompts, **settings),
        tables=tables,
        load=load or {},
        published=[Table(**table) for table in source["published"]],
    )


_NOTEBOOK = _from_source(
    "notebook",
    _compared(0.0, [3, "auto"]),
    preset_tables.notebook,
    load={"n_gpu_layers": 45, "n_gpu_layers_draft": -1},
    n_tokens=250,
    n_runs=3,
    ignore_eos=False,
)
_LLAMA_SSP = _from_source(
    "llama-ssp",
    _compared(1.0, [4, "auto"], **_NO_TRUNCATION),
    preset_tables.llama_ssp,
    n_tokens=64,
    n_runs=1,
)

# Google's (arXiv 2211.17192) and DeepMind's (arXiv 2302.01318) papers describe the same rule: both
# rows run `rejection`, with different random numbers.
_GOOGLE, _DEEPMIND, _BLOCK = "Google's", "DeepMind's", "block verification"


def _variants(temperature: float, **sampling: Any) -> Sequence[Contender]:
    plain, alone, *_ = _compared(temperature, [4], **sampling)
    rules = {_GOOGLE: "rejection", _DEEPMIND: "rejection", _BLOCK: "traversal"}
    options = {**sampling, "temperature": temperature, "n_draft": 4}
    variants = [
        Contender(name, {**options, "verify": rule}, baseline=plain.name)
        for name, rule in rules.items()
    ]
    return [plain, alone, *variants]


_LLMSS = _from_source(
    "llmss",
    _variants(1.0, top_k=20, top_p=0.9, min_p=0.0),
    preset_tables.llmss,
    n_tokens=100,
    n_runs=5,
)
_GPT2 = _from_source(
    "gpt2",
    contenders(
        lengths=[4],
        rules=["rejection"],
        temperatures=[0.6],
        sampling={"top_k": 25, "top_p": 0.9, "min_p": 0.0},
        has_draft=False,
    ),
    preset_tables.gpt2,
    n_tokens=40,
    n_runs=50,
)


def _own(
    name: str,
    about: str,
    temperatures: Sequence[float] = (0.0,),
    tables: Callable[[BenchResults], list[Table]] = preset_tables.general,
    n_prompts: int | None = None,
    **variants: Any,
) -> Preset:
    pair = PresetPair("Llama-3.1-8B-Instruct-Q4_K_M", "Llama-3.2-1B-Instruct-Q4_K_M", "8B", "1B")
    competing = contenders(temperatures=temperatures, has_draft=False, **variants)
    return Preset(
        name=name,
        about=about,
        pairs=[pair],
        experiment=Experiment(competing, own_prompts()[:n_prompts], n_runs=3, n_tokens=96),
        tables=tables,
    )


_STAGED = _own(
    "staged",
    "Drafting strategies: none, n-gram lookup, the draft model, the draft model with a draft of "
    "its own (--draft-of-draft, else n-grams), and auto.",
    lengths=["auto"],
    drafters=["ngram", "model", "staged", "auto"],
)
_LENGTHS = _own(
    "lengths",
    "Draft lengths: 1 to 16 tokens, and auto.",
    lengths=[1, 2, 3, 4, 5, 6, 8, 12, 16, "auto"],
)
_TEMPERATURES = _own(
    "temperatures",
    "Temperatures 0 to 1.3, with each verification rule.",
    temperatures=[0.0, 0.3, 0.7, 1.0, 1.3],
    tables=preset_tables.temperatures,
    n_prompts=3,
    lengths=[3],
    rules=["match", "rejection", "traversal"],
    sampling=_NO_TRUNCATION,
)

PRESETS = {
    each.name: each
    for each in (_NOTEBOOK, _LLAMA_SSP, _LLMSS, _GPT2, _STAGED, _LENGTHS, _TEMPERATURES)
}
