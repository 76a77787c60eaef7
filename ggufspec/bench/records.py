"""What a benchmark keeps: one Measurement a text, and the document that they are written down in.

Knows facts and JSON; measures nothing and concludes nothing. What it has read can be reckoned with:
counts that agree with each other, seconds that are durations, names that somebody bears.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec.bench import json_decoding
from ggufspec.errors import OptionError

FORMAT = "ggufspec-bench-1"
_MOST_BYTES = 2**30
_AGAIN = "give a file that `ggufspec bench --json` wrote, or measure again"


class Key(NamedTuple):
    """Which text of all: a contender continues a prompt in a run."""

    contender: str
    prompt: str
    run: int


@dataclass(frozen=True)
class Contender:
    """One way to write: options of generation under a name.

    `model`: who writes: "pair", "draft" for the draft model alone, or "peer": somebody else, whose
    name is `peer`. `baseline`: the name of the contender that its speed is compared with; None: it
    is one itself, or nothing is comparable. `pair`: of which models, where a benchmark has several;
    then the name begins with it.
    """

    name: str
    options: Mapping[str, Any]
    model: str = "pair"
    baseline: str | None = None
    pair: str = ""
    peer: str | None = None

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
    """One text. Seconds are wall time; `at`: seconds from the start of the benchmark.

    Of a peer, `rounds` and counts by position are empty, and `tokens` too where it tells none.
    """

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
        for found in whole["contenders"]:
            found["options"] = plain(found["options"])
        return {**whole, "settings": plain(whole["settings"]), "models": plain(whole["models"])}

    @staticmethod
    def of_document(document: object, where: str) -> Results:
        """The results in a document; `where` names it in errors. Raises OptionError."""
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            said = f"its format is {found!r:.40}" if found is not None else "it names no format"
            raise OptionError(
                f"{where} holds no results of ggufspec bench ({said}, not {FORMAT!r}); {_AGAIN}"
            )
        try:
            return _results(document)
        except ValueError as error:
            raise OptionError(
                f"{where} is not as `ggufspec bench --json` writes it: {error}; {_AGAIN}"
            ) from error


def plain(value: object) -> Any:
    """The same in JSON, as it is read back: no infinite numbers, no halves of characters."""
    if isinstance(value, Mapping):
        return {str(plain(str(name))): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, Path)):  # a path may be of bytes that are no UTF-8
        return str(value).encode("utf-8", "backslashreplace").decode()
    return value


def read_results(path: Path) -> Results:
    """The results in a file. Raises OptionError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"cannot read {path}: {reason}; {_AGAIN}") from error
    if len(data) > _MOST_BYTES:
        raise OptionError(
            f"{path} is larger than {_MOST_BYTES:,} bytes, which results are not; {_AGAIN}"
        )
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 (byte {error.start}); {_AGAIN}") from error
    except ValueError as error:
        raise OptionError(f"{path} is not JSON ({error}); {_AGAIN}") from error
    except RecursionError as error:
        raise OptionError(f"{path} is JSON of too many levels; {_AGAIN}") from error
    return Results.of_document(document, str(path))


# Reading -----------------------------------------------------------------------------------------

_CONTENDER = json_decoding.record(
    {
        "name": json_decoding.text,
        "options": json_decoding.facts,
        "model": json_decoding.text,
        "baseline": json_decoding.optional(json_decoding.text),
        "pair": json_decoding.text,
        "peer": json_decoding.optional(json_decoding.text),
    }
)
_PARTING = json_decoding.record(
    {
        "contender": json_decoding.text,
        "prompt": json_decoding.text,
        "position": json_decoding.count,
        "margin": json_decoding.amount,
    }
)


def _turn(where: str, value: object) -> Turn:
    """A round from its list of numbers."""
    kinds: Sequence[json_decoding.Kind] = (*[json_decoding.count] * 3, *[json_decoding.seconds] * 2)
    if not isinstance(value, list) or len(value) != len(kinds):
        raise ValueError(f"{where} is no round; it must be a list of {len(kinds)} numbers")
    turn = Turn(*(kind(where, each) for kind, each in zip(kinds, value, strict=True)))
    _check_most(where, turn.n_accepted, turn.n_drafted)
    return turn


_MEASUREMENT = json_decoding.record(
    {
        **dict.fromkeys(("contender", "prompt"), json_decoding.text),
        "run": json_decoding.count,
        "category": json_decoding.text,
        "at": json_decoding.seconds,
        **dict.fromkeys(
            ("n_prompt", "n_generated", "n_rounds", "n_drafted", "n_accepted"), json_decoding.count
        ),
        **dict.fromkeys(
            ("drafted_by_position", "accepted_by_position", "tokens"),
            json_decoding.several(json_decoding.count),
        ),
        **dict.fromkeys(
            ("prompt_seconds", "first_token_seconds", "generation_seconds"), json_decoding.seconds
        ),
        "joules": json_decoding.optional(json_decoding.amount),
        "rounds": json_decoding.several(_turn),
    }
)
_RESULTS = json_decoding.record(
    {
        **dict.fromkeys(
            ("settings", "machine", "versions", "models", "memory"), json_decoding.facts
        ),
        "contenders": json_decoding.several(lambda where, value: _contender(where, value)),
        "measurements": json_decoding.several(lambda where, value: _measurement(where, value)),
        "partings": json_decoding.several(lambda where, value: Parting(**_PARTING(where, value))),
        "interrupted": json_decoding.switch,
    }
)


def _results(document: object) -> Results:
    """Raises ValueError."""
    made = Results(**_RESULTS("", document))
    names = [contender.name for contender in made.contenders]
    _check_once("the contender", names)
    _check_once("the text", [found.key for found in made.measurements])
    users = [contender.baseline for contender in made.contenders if contender.baseline is not None]
    users += [found.contender for found in made.measurements]
    users += [parting.contender for parting in made.partings]
    unknown = next((name for name in users if name not in names), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is named, which is none of the contenders")
    return made


def _contender(where: str, value: object) -> Contender:
    made = Contender(**_CONTENDER(where, value))
    if made.model not in ("pair", "draft", "peer"):
        raise ValueError(f"{where}.model is {made.model!r:.40}; it must be pair, draft or peer")
    if "temperature" in made.options:
        json_decoding.amount(f"{where}.options.temperature", made.options["temperature"])
    return made


def _measurement(where: str, value: object) -> Measurement:
    made = Measurement(**_MEASUREMENT(where, value))
    _check_most(where, made.n_accepted, made.n_drafted)
    drafted, accepted = made.drafted_by_position, made.accepted_by_position
    if len(drafted) != len(accepted):
        raise ValueError(
            f"{where} has {len(drafted)} positions that were drafted and {len(accepted)} that were "
            "accepted; there must be as many"
        )
    for n_drafted, n_accepted in zip(drafted, accepted, strict=True):
        _check_most(where, n_accepted, n_drafted)
    for name, n_needed in (("tokens", made.n_generated), ("rounds", made.n_rounds)):
        n_found = len(getattr(made, name))
        if n_found not in (0, n_needed):  # none: they were left out
            raise ValueError(f"{where} has {n_found} {name}; by its counts it must be {n_needed}")
    return made


def _check_most(where: str, n_accepted: int, n_drafted: int) -> None:
    if n_accepted > n_drafted:
        raise ValueError(
            f"{where} has {n_accepted} tokens accepted of {n_drafted} drafted; it must be fewer"
        )


def _check_once(what: str, names: Sequence[object]) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r:.80} is there twice; it must be there once")
        seen.add(name)


def _rounded(turn: Mapping[str, Any]) -> list[Any]:
    """A round as a list of numbers: there are many of them."""
    return [round(value, 6) if isinstance(value, float) else value for value in turn.values()]
