"""What a benchmark keeps: one Measurement a text, and the document that they are written down in.

Knows facts and JSON; measures nothing and concludes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from ggufspec.errors import OptionError

FORMAT = "ggufspec-bench-1"


class Key(NamedTuple):
    """Which text of all: a contender continues a prompt in a run."""

    contender: str
    prompt: str
    run: int


@dataclass(frozen=True)
class Contender:
    """One way to write: options of generation under a name.

    `model`: who writes: "pair", or "draft" for the draft model alone. `baseline`: the name of the
    contender that its speed is compared with; None: it is one itself, or nothing is comparable.
    `pair`: of which models, where a benchmark has several; then the name begins with it.
    """

    name: str
    options: Mapping[str, Any]
    model: str = "pair"
    baseline: str | None = None
    pair: str = ""

    @property
    def label(self) -> str:
        """Its name among those of its pair."""
        return self.name.removeprefix(f"{self.pair}: ") if self.pair else self.name

    def of_pair(self, pair: str) -> Contender:
        """The same, as one of a pair's."""
        beside = self.baseline and f"{pair}: {self.baseline}"
        return replace(self, name=f"{pair}: {self.name}", baseline=beside, pair=pair)

    @property
    def temperature(self) -> float:
        return float(self.options.get("temperature", 0.0))


@dataclass(frozen=True)
class Turn:
    """One round of the loop: tokens that it added, drafted and accepted ones, and its seconds."""

    n_tokens: int
    n_drafted: int
    n_accepted: int
    draft_seconds: float
    target_seconds: float  # verification included


@dataclass(frozen=True)
class Measurement:
    """One text. Seconds are wall time; `at`: seconds from the start of the benchmark."""

    contender: str
    prompt: str
    run: int
    category: str
    at: float
    n_prompt: int
    n_generated: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    drafted_by_position: Sequence[int]
    accepted_by_position: Sequence[int]
    prompt_seconds: float
    first_token_seconds: float  # from the request to the first tokens, the prompt included
    generation_seconds: float  # from the end of the prompt to the last token
    joules: float | None = None  # of the processor, where the machine tells
    tokens: Sequence[int] = ()
    rounds: Sequence[Turn] = ()

    @property
    def key(self) -> Key:
        return Key(self.contender, self.prompt, self.run)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, the prompt's time left out."""
        return self.n_generated / self.generation_seconds if self.generation_seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        """The whole time, the prompt included."""
        return self.prompt_seconds + self.generation_seconds


@dataclass(frozen=True)
class Parting:
    """Where a text at temperature 0 left plain's, and by how much plain preferred its own token."""

    contender: str
    prompt: str
    position: int  # tokens that were the same
    margin: float  # in logits; near 0 it was rounding that decided


@dataclass
class Results:
    """All of a benchmark. `machine`, `versions`, `models` and `settings` are plain JSON."""

    settings: dict[str, Any]
    contenders: list[Contender]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def of(self, contender: str) -> list[Measurement]:
        """Its measurements, in the order in which they were made."""
        return [found for found in self.measurements if found.contender == contender]

    def to_document(self) -> dict[str, Any]:
        """For JSON: see of_document."""
        whole = {"format": FORMAT, **asdict(self)}
        for found in whole["measurements"]:
            found["rounds"] = [_rounded(turn) for turn in found["rounds"]]
        return whole

    @staticmethod
    def of_document(document: object, where: str) -> Results:
        """The results in a document; `where` names it in errors. Raises OptionError."""
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise OptionError(
                f"{where} holds no results of ggufspec bench ({FORMAT}); give a file that "
                "`ggufspec bench --json` wrote"
            )
        try:
            names = {each.name for each in fields(Results)}
            kept = {name: document[name] for name in names}
            kept["contenders"] = [Contender(**each) for each in kept["contenders"]]
            kept["partings"] = [Parting(**each) for each in kept["partings"]]
            kept["measurements"] = [_measurement(each) for each in kept["measurements"]]
            return Results(**kept)
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(
                f"{where} is not as `ggufspec bench --json` writes it ({error}); measure again"
            ) from error


def _measurement(document: dict[str, Any]) -> Measurement:
    rounds = tuple(Turn(*turn) for turn in document["rounds"])
    made = Measurement(**{**document, "rounds": rounds})
    for name in ("at", "prompt_seconds", "first_token_seconds", "generation_seconds"):
        if not isinstance(getattr(made, name), (int, float)):
            raise ValueError(f"{name} is no number")
    return made


def _rounded(turn: Mapping[str, Any]) -> list[Any]:
    """A round as a list of numbers: there are many of them."""
    return [round(value, 6) if isinstance(value, float) else value for value in turn.values()]
