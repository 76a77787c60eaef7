"""The experiments that the project started from: models, prompts, settings, published results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ggufspec.bench import preset_tables
from ggufspec.bench.contenders import contenders
from ggufspec.bench.prompts import own_prompts
from ggufspec.bench.records import BenchResults, Contender
from ggufspec.bench.run import Experiment
from ggufspec.bench.tables import Table
from ggufspec.common.prompts import Prompt
from ggufspec.errors import OptionError

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

    def experiment_of(self, pair: str, **changed: Any) -> Experiment:
        """The experiment for one of several pairs; `changed`: fields to replace unless None."""
        given = {name: value for name, value in changed.items() if value is not None}
        competing = [each.of_pair(pair) for each in self.experiment.contenders]
        return replace(self.experiment, contenders=competing, **given)


def preset(name: str) -> Preset:
    """Raises OptionError for an unknown name."""
    if name not in PRESETS:
        raise OptionError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _compared(
    temperature: float, lengths: Sequence[int | str], **options: Any
) -> Sequence[Contender]:
    return contenders(lengths=lengths, temperatures=[temperature], sampling=options, has_draft=True)


_NOTEBOOK = Preset(
    name="notebook",
    about="A notebook of April 2024: Llama 3 70B with 8B as its draft, on an RTX 4090.",
    pairs=[
        PresetPair(
            "70B-Q3_K_S",
            "8B-Q3_K_L",
            "Meta-Llama-3-70B-Instruct-Q3_K_S.gguf",
            "Meta-Llama-3-8B-Instruct.Q3_K_L.gguf",
        )
    ],
    experiment=Experiment(
        contenders=_compared(0.0, [3, "auto"]),
        prompts=[
            Prompt(
                id="napoleon",
                turns=("Make me a summary of the Napoleon life",),
                system="You are a polite chatbot who always responds the user requests",
            )
        ],
        n_tokens=250,
        n_runs=3,
        ignore_eos=False,
    ),
    tables=preset_tables.notebook,
    load={"n_gpu_layers": 45, "n_gpu_layers_draft": -1},
    published=[
        Table(
            "Published: one run of llama.cpp's speculative example of April 2024",
            ["Model", "GPU layers", "tokens/s", "gain %"],
            [
                ["Meta-Llama-3-70B-Instruct-Q3_K_S.gguf", "45/80", "2.01", "-"],
                ["Meta-Llama-3-8B-Instruct.Q3_K_L.gguf", "32/32", "87.02", "-"],
                ["speculative, draft 3 (70.8 % accepted)", "45/80 and 32/32", "2.58", "28%"],
            ],
        )
    ],
)

_SSP_PROMPTS = (  # the source does not publish its fifteen
    "The ferry to the islands leaves at seven, so we",
    "A good loaf of bread needs only four things:",
    "When the lights went out in the theatre,",
    "My grandfather's clock had stopped at ten past four, and",
    "The capital of Portugal is",
    "Dear neighbours, please note that on Monday",
    "To boil an egg so that the yolk stays soft,",
    "The first snow of the year fell on",
    "There are three reasons why rivers bend:",
    "She had never liked the colour of the door, but",
    "In the last minute of the game, the keeper",
    "Water freezes at 0 degrees, and boils at",
    "The letter was signed by a man whom nobody in the village",
    "If you want to learn to swim as a grown-up, begin by",
    "Once the bees had settled in their new hive,",
)

_LLAMA_SSP = Preset(
    name="llama-ssp",
    about="llama-ssp: Llama 13B, 30B and 65B with 7B as the draft, in milliseconds per token.",
    pairs=[
        PresetPair("Llama-2-13B-Q4_K_M", "Llama-2-7B-Q4_K_M", "13B (Llama 2)", "7B (Llama 2)"),
        PresetPair("LLaMA-30B-Q4_K_S", "LLaMA-7B-Q4_K_S", "30B", "7B (Q4_K_S)"),
        PresetPair("LLaMA-65B-Q4_K_M", "LLaMA-7B-Q4_0", "65B", "7B (Q4_0)"),
    ],
    experiment=Experiment(
        contenders=_compared(1.0, [4, "auto"], **_NO_TRUNCATION),
        prompts=[Prompt(id=str(i), turns=(text,)) for i, text in enumerate(_SSP_PROMPTS, 1)],
        n_tokens=64,
        n_runs=1,
    ),
    tables=preset_tables.llama_ssp,
    published=[
        Table(
            "Published: models alone, 4 A10G of a g5.12xlarge (left), 8 A100 of a p4d.24xlarge",
            ["Model_type", "Ms/token, g5", "Ms/token, p4d"],
            [
                ["7B", "86ms (4 GPUs)", "60ms"],
                ["7B_8bit", "210ms", "210ms"],
                ["13B", "-", "100ms"],
                ["13B_8bit", "270ms", "-"],
                ["30B", "-", "260ms"],
                ["30B_8bit", "405ms", "-"],
                ["65B", "-", "510ms"],
                ["65B_8bit", "530ms", "-"],
            ],
        ),
        Table(
            "Published: speculative sampling, g5.12xlarge",
            ["Target / draft", "regular", "speculative"],
            [
                ["13B_8bit / 7B_8bit_4GPUs", "270ms", "330ms"],
                ["30B_8bit / 7B_8bit_4GPUs", "405ms", "370ms"],
            ],
        ),
    ],
)

# Google's (arXiv 2211.17192) and DeepMind's (arXiv 2302.01318) papers describe the same rule: both
# rows run `rejection`, with different random numbers.
_GOOGLE, _DEEPMIND, _BLOCK = "Google's", "DeepMind's", "block verification"


def _variants(temperature: float, **sampling: Any) -> Sequence[Contender]:
    plain, alone, *_ = _compared(temperature, [4], **sampling)
    rules = {_GOOGLE: "rejection", _DEEPMIND: "rejection", _BLOCK: "block"}
    options = {**sampling, "temperature": temperature, "n_draft": 4}
    return [
        plain,
        alone,
        *(
            Contender(name, {**options, "verify": rule}, baseline=plain.name)
            for name, rule in rules.items()
        ),
    ]


_LLMSS = Preset(
    name="llmss",
    about="LLMSpeculativeSampling: Llama 2 70B with 7B, BLOOMZ 7B1 with BLOOM 560M; Google's and "
    "DeepMind's variants side by side.",
    pairs=[
        PresetPair("Llama-2-70B-Q4_K_M", "Llama-2-7B-Q4_K_M", "llama2-70b", "llama2-7b"),
        PresetPair("BLOOMZ-7B1-Q4_K_M", "BLOOM-560M-Q4_K_M", "bloomz-7b1", "bloom-560m"),
    ],
    experiment=Experiment(
        contenders=_variants(1.0, top_k=20, top_p=0.9, min_p=0.0),
        prompts=[
            Prompt(id="fox", turns=("The quick brown fox jumps over the lazy ",)),
            Prompt(id="president", turns=("Who is the president of the USA",)),
        ],
        n_tokens=100,
        n_runs=5,
    ),
    tables=preset_tables.llmss,
    published=[
        Table(
            "Published: on GPUs that are not named",
            ["", "llama2-7b", "llama2-70b", "Speculative"],
            [["speed(tokens/sec)", "1084.86", "329.83", "427.02"]],
        )
    ],
)

_GPT2_PUBLISHED = ["Method", "num_runs", "time", "+/- std", "speedup"]
_GPT2 = Preset(
    name="gpt2",
    about="A study of GPT-2 XL with itself as its draft (nothing may be rejected), and with GPT-2.",
    pairs=[
        PresetPair("GPT-2-XL-Q8_0", "GPT-2-XL-Q8_0", "gpt2-xl", "gpt2-xl"),
        PresetPair("GPT-2-XL-Q8_0", "GPT-2-Q8_0", "gpt2-xl", "gpt2"),
    ],
    experiment=Experiment(
        contenders=contenders(
            lengths=[4],
            rules=["rejection"],
            temperatures=[0.6],
            sampling={"top_k": 25, "top_p": 0.9, "min_p": 0.0},
            has_draft=False,
        ),
        prompts=[
            Prompt(
                id="turing", turns=("Alan Turing theorized that computers would one day become",)
            )
        ],
        n_tokens=40,
        n_runs=50,
    ),
    tables=preset_tables.gpt2,
    published=[
        Table(
            "Published: gpt2-xl / gpt2-xl, MacBook Pro M2, seconds",
            _GPT2_PUBLISHED,
            [
                ["Autoregressive Sampling", "50", "2.84", "0.20", "1.00"],
                ["Speculative Sampling", "50", "2.96", "0.22", "0.96"],
            ],
        ),
        Table(
            "Published: gpt2-xl / gpt2, MacBook Pro M2, seconds",
            _GPT2_PUBLISHED,
            [
                ["Autoregressive Sampling", "50", "2.86", "0.16", "1.00"],
                ["Speculative Sampling", "50", "2.17", "0.32", "1.31"],
            ],
        ),
    ],
)


def _own(
    name: str,
    about: str,
    temperatures: Sequence[float] = (0.0,),
    tables: Callable[[BenchResults], list[Table]] = preset_tables.general,
    n_prompts: int | None = None,
    **variants: Any,
) -> Preset:
    """An experiment of our own."""
    competing = contenders(temperatures=temperatures, has_draft=False, **variants)
    return Preset(
        name=name,
        about=about,
        pairs=[
            PresetPair("Llama-3.1-8B-Instruct-Q4_K_M", "Llama-3.2-1B-Instruct-Q4_K_M", "8B", "1B")
        ],
        experiment=Experiment(competing, own_prompts()[:n_prompts], n_runs=3, n_tokens=96),
        tables=tables,
    )


_STAGED = _own(
    "staged",
    "Drafting strategies: none, n-gram lookup, the draft model, or both.",
    lengths=["auto"],
    drafters=["ngram", "model", "auto"],
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
    rules=["match", "rejection", "block"],
    sampling=_NO_TRUNCATION,
)

PRESETS = {
    each.name: each
    for each in (_NOTEBOOK, _LLAMA_SSP, _LLMSS, _GPT2, _STAGED, _LENGTHS, _TEMPERATURES)
}
