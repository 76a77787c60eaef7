"""The results of a benchmark, one Measurement for each text, and their JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ggufspec.common.facts import plain
from ggufspec.common.reading import read_file
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError

FORMAT = "ggufspec-bench-1"
Record = TypeVar("Record")
PLAIN = "plain"  # names of contenders
DRAFT_ALONE = "draft alone"
_hints = cache(get_type_hints)
_REMEDY = "give a file that `ggufspec bench --json` wrote, or measure again"


class TextKey(NamedTuple):
    contender: str
    prompt: str
    run: int


@dataclass(frozen=True)
class Contender:
    name: str  # begins with the name of the pair if a benchmark has several pairs
    options: Mapping[str, Any]
    model: str = "pair"  # or "draft" (the draft model alone), or "baseline" (another program)
    baseline: str | None = None  # whose speed its own is compared with; None: plain, draft alone
    pair: str = ""  # name of the pair of models if a benchmark has several
    program: str | None = None  # name of a baseline's program

    @property
    def label(self) -> str:
        """The name without the name of its pair."""
        return self.name.removeprefix(f"{self.pair}: ") if self.pair else self.name

    def of_pair(self, pair: str) -> Contender:
        baseline = self.baseline and f"{pair}: {self.baseline}"
        return replace(self, name=f"{pair}: {self.name}", baseline=baseline, pair=pair)

    @property
    def temperature(self) -> float:
        return float(self.options.get("temperature", 0.0))

    @property
    def is_greedy(self) -> bool:
        given = {name: self.options[name] for name in ("top_k", "samplers") if name in self.options}
        return Sampling(temperature=self.temperature, **given).effective_temperature == 0


@dataclass(frozen=True)
class RoundTiming:
    """One round: numbers of added, drafted and accepted tokens, and seconds."""

    n_tokens: int
    n_drafted: int
    n_accepted: int
    draft_seconds: float
    target_seconds: float  # with verification


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One text. Seconds are wall time. A baseline has no rounds and no counts by position."""

    contender: str
    prompt: str = ""
    run: int = 0
    category: str = ""
    at: float = 0.0  # seconds from the start of the benchmark
    n_prompt: int
    n_generated: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    drafted_by_position: Sequence[int] = ()
    accepted_by_position: Sequence[int] = ()
    prompt_seconds: float
    first_token_seconds: float  # from the request to the first tokens, with the prompt
    generation_seconds: float  # from the end of the prompt to the last token
    tokens: Sequence[int] = ()
    rounds: Sequence[RoundTiming] = ()

    @property
    def key(self) -> TextKey:
        return TextKey(self.contender, self.prompt, self.run)

    @property
    def has_tokens(self) -> bool:
        return bool(self.tokens) or not self.n_generated

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, without the time of the prompt."""
        return self.n_generated / self.generation_seconds if self.generation_seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        return self.prompt_seconds + self.generation_seconds


@dataclass(frozen=True)
class FirstDifference:
    """Where a text at temperature 0 differs from plain decoding's. See engine.scoring."""

    contender: str
    prompt: str
    position: int  # number of equal tokens before it
    margin: float  # logit difference of the two tokens
    rounding: float | None = None  # largest measured change of margins by batches

    @property
    def is_near_tie(self) -> bool:
        return self.rounding is not None and 0 < self.rounding >= self.margin


_RECORDS = (Contender, Measurement, FirstDifference, RoundTiming)  # they occur in lists


@dataclass
class BenchResults:
    """A whole benchmark. `machine`, `versions`, `models` and `settings` are plain JSON."""

    settings: dict[str, Any]
    contenders: list[Contender]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    divergences: list[FirstDifference] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False

    def of(self, contender: str) -> list[Measurement]:
        return [found for found in self.measurements if found.contender == contender]

    def with_plain(self, contender: Contender) -> list[tuple[Measurement, Measurement]]:
        others = {each.key[1:]: each for each in self.of(contender.baseline or contender.name)}
        texts = self.of(contender.name)
        return [(text, others[text.key[1:]]) for text in texts if text.key[1:] in others]

    def greedy_with_plain(self, contender: Contender) -> list[tuple[Measurement, Measurement]]:
        """Those pairs of `with_plain` that are at temperature 0 and have known tokens."""
        if contender.baseline is None or not contender.is_greedy:
            return []
        pairs = self.with_plain(contender)
        return [(text, other) for text, other in pairs if text.has_tokens and other.has_tokens]

    def to_document(self) -> dict[str, Any]:
        """The results as JSON, which `of_document` reads."""
        whole = {"format": FORMAT, **asdict(self)}
        for found in whole["measurements"]:
            found["rounds"] = [  # numbers are rounded, to keep files small
                [round(each, 6) if isinstance(each, float) else each for each in round_.values()]
                for round_ in found["rounds"]
            ]
        for found in whole["contenders"]:
            found["options"] = plain(found["options"])
        return {**whole, "settings": plain(whole["settings"]), "models": plain(whole["models"])}

    @staticmethod
    def of_document(document: Any, where: str) -> BenchResults:
        """The results in a document; `where` names it in errors. Raises OptionError."""
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            actual = f"its format is {found!r:.40}" if found is not None else "it names no format"
            raise OptionError(
                f"{where} has no results of ggufspec bench ({actual}, not {FORMAT!r}); {_REMEDY}"
            )
        try:
            found = _record(BenchResults, document)
            for each in found.contenders:
                _check(float, "temperature", each.temperature)
            for text in found.measurements:
                if len(text.drafted_by_position) != len(text.accepted_by_position):
                    raise ValueError("the counts by position have different lengths")
            return found
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise OptionError(
                f"{where} is not as `ggufspec bench --json` writes it: {error}; {_REMEDY}"
            ) from error


def by_position(texts: Sequence[Measurement]) -> tuple[list[int], list[int]]:
    """The counts of drafted and of accepted tokens at each position, over all texts."""
    drafted = zip_longest(*(text.drafted_by_position for text in texts), fillvalue=0)
    accepted = zip_longest(*(text.accepted_by_position for text in texts), fillvalue=0)
    return list(map(sum, drafted)), list(map(sum, accepted))


def read_results(path: Path) -> BenchResults:
    """The results in a file. Raises OptionError."""
    try:
        document = json.loads(read_file(path, "the file", OptionError).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not JSON in UTF-8 ({error}); {_REMEDY}") from error
    return BenchResults.of_document(document, str(path))


def _record(kind: type[Record], document: Any) -> Record:
    known = fields(kind)  # type: ignore[arg-type]
    if kind is RoundTiming:
        document = dict(zip((each.name for each in known), document, strict=False))
    required = {each.name for each in known if each.default is MISSING}
    if missing := sorted(name for name in required if name not in document):
        raise ValueError(f"it has no {', '.join(map(repr, missing))}")
    given = {}
    for each in known:
        if each.name in document:
            value, needed = document[each.name], _hints(kind)[each.name]  # type: ignore[arg-type]
            if (inner := next(iter(get_args(needed)), None)) in _RECORDS:
                value = [_record(inner, part) for part in value]
            _check(needed, each.name, value)
            given[each.name] = value
    return kind(**given)


def _check(kind: Any, name: str, value: object) -> None:
    """Raise ValueError unless the value has the type of an annotation."""
    if not _fits(kind, value):
        raise ValueError(f"{name!r} is {value!r:.40}")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value has a type. Numbers must be 0, or from 1e-9 to 2^53: rates stay finite."""
    if kind in (int, float):
        return type(value) in (int, kind) and (value == 0 or 1e-9 <= value <= 2**53)
    if kind is str:  # without surrogates, which cannot be printed
        return isinstance(value, str) and value == value.encode(errors="replace").decode()
    inner, origin = get_args(kind), get_origin(kind) or kind
    if kind is Any:
        return True
    if origin is UnionType:
        return any(_fits(each, value) for each in inner)
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(_fits(inner[0], each) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(inner[1], each) for each in value.values())
    return isinstance(value, origin)
