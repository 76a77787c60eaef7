"""The options of one generation, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggufspec.common import defaults, validate
from ggufspec.common.progress import NamedProgress
from ggufspec.decoding import verify as rules
from ggufspec.decoding.sampling import Sampling, SamplingOptions
from ggufspec.drafting.temperature import DraftTemperature
from ggufspec.errors import OptionError


class GenerateOptions(SamplingOptions, total=False):
    """The options of one generation; the defaults are those of CheckedOptions and Sampling."""

    max_tokens: int | None  # None: until the model stops or the context is full
    n_draft: int | str  # maximum drafted tokens per round; "auto": chosen in each round
    draft_temperature: float | str  # "auto": learned, for the most accepted tokens; 0: greedy
    dry_sequence_breakers: Sequence[str]  # texts at which DRY restarts its search
    grammar: str | None  # GBNF; the text matches its rule `root`
    json_schema: str | Mapping[str, object] | None  # the text is JSON that matches it
    seed: int | None  # None: a random one
    stop: str | Sequence[str]  # texts that end the generation; they are not part of the text
    ignore_eos: bool  # ban the tokens that end a text
    drafter: str | None  # "auto", "model", "ngram", "none"; None: auto, model for a fixed n_draft
    verify: str  # "block", "rejection", "match"
    progress: NamedProgress | None  # of the prompt: ("target", "draft" or "costs", done, of)


@dataclass(frozen=True)
class CheckedOptions:
    """The options of one generation, checked once. Raises OptionError."""

    max_tokens: int | None = None
    n_draft: int | str = defaults.N_DRAFT
    draft_temperature: float | str = defaults.DRAFT_TEMPERATURE
    dry_sequence_breakers: Sequence[str] = defaults.DRY_SEQUENCE_BREAKERS
    grammar: str | None = None
    json_schema: str | Mapping[str, object] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    drafter: str | None = None
    verify: str = defaults.VERIFY
    progress: NamedProgress | None = None
    sampling: Sampling = field(default_factory=Sampling)

    @staticmethod
    def of(options: GenerateOptions) -> CheckedOptions:
        """Check options; those of SamplingOptions become `sampling`."""
        rest: dict[str, Any] = dict(options)
        names = [name for name in SamplingOptions.__annotations__ if name in rest]
        unknown = sorted(set(rest) - set(CheckedOptions.__annotations__) - set(names))
        if unknown:
            raise TypeError(f"there is no option {', '.join(unknown)}; see GenerateOptions")
        sampling = Sampling(**{name: rest.pop(name) for name in names})
        return CheckedOptions(sampling=sampling, **rest)

    @property
    def initial_draft_temperature(self) -> float | str:
        """The draft's temperature, or "auto": learned.

        With `match`, an argmax token has the highest chance of acceptance: nothing is learned.
        """
        is_greedy = self.draft_temperature == "auto" and self.verify == "match"
        return 0.0 if is_greedy else self.draft_temperature

    def drafter_name(self, *, has_draft: bool) -> str:
        """The drafting strategy, for an engine with or without a draft model."""
        if self.drafter is not None:
            return self.drafter
        if self.n_draft == "auto":
            return "auto"
        return "model" if has_draft else "none"

    def __post_init__(self) -> None:
        if isinstance(self.n_draft, str):
            if self.n_draft != "auto":
                raise OptionError(
                    f"n_draft is {self.n_draft!r}; it must be a whole number, or 'auto'"
                )
        else:
            object.__setattr__(self, "n_draft", validate.whole("n_draft", self.n_draft))
            if self.n_draft < 1:
                raise OptionError(
                    f"n_draft is {self.n_draft}; it must be at least 1, or 'auto'. "
                    "To decode without drafting, use the drafter 'none'"
                )
        for name, least in (("max_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and validate.whole(name, value) < least:
                raise OptionError(f"{name} is {value}; it must be at least {least}")
        for name in ("grammar", "drafter"):
            if getattr(self, name) is not None:
                validate.text(name, getattr(self, name))
        rules.rule(validate.text("verify", self.verify))
        validate.switch("ignore_eos", self.ignore_eos)
        validate.function("progress", self.progress)
        if not isinstance(self.json_schema, (str, Mapping, bool, type(None))):
            raise OptionError(
                f"json_schema is {self.json_schema!r}; it must be the text of a schema, or a dict"
            )
        validate.texts("dry_sequence_breakers", self.dry_sequence_breakers)
        if not isinstance(self.stop, str):
            validate.texts("stop", self.stop)
        DraftTemperature(self.sampling.temperature, self.draft_temperature)
        if self.grammar is not None and self.json_schema is not None:
            raise OptionError("both a grammar and a JSON schema are given; give one of them")
        if self.ignore_eos and (self.grammar is not None or self.json_schema is not None):
            raise OptionError(
                "ignore_eos bans the tokens that end a text, but a text under a grammar or JSON "
                "schema has to end; leave one of them out"
            )
