"""What can be asked of one generation, and whether it makes sense. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggufspec.common import defaults, validate
from ggufspec.decoding import verify as rules
from ggufspec.decoding.sampling import Sampling, SamplingOptions
from ggufspec.drafting.temperature import DraftTemperature
from ggufspec.errors import OptionError

PromptProgress = Callable[[str, int, int], None]  # (whose, tokens done, tokens to read)


class GenerateOptions(SamplingOptions, total=False):
    """What can be asked of one generation; the defaults are those of Request and Sampling."""

    max_tokens: int | None  # None: until the model stops or the context is full
    n_draft: int | str  # tokens that a round drafts at most; "auto": chosen in each round
    draft_temperature: float | str  # "auto": learned, so that most is accepted; 0: greedy
    dry_sequence_breakers: Sequence[str]  # texts over which DRY sees no repetition
    grammar: str | None  # GBNF, whose rule `root` is the whole text
    json_schema: str | Mapping[str, object] | None  # the text is JSON that it accepts
    seed: int | None  # None: a fresh one
    stop: str | Sequence[str]  # texts that end the generation, and are no part of it
    ignore_eos: bool  # forbid the tokens that end a text
    drafter: str | None  # "auto", "model", "ngram", "none"; None: auto, model for a fixed n_draft
    verify: str  # "block", "rejection", "match"
    progress: PromptProgress | None  # hears of the prompt being read


@dataclass(frozen=True)
class Request:
    """The options of one generation, checked. Raises OptionError."""

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
    progress: PromptProgress | None = None
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def learned_temperature(self) -> float | str:
        """The draft's, or "auto". By `match`, a token stands as often as the target draws it: there
        is nothing to learn, the likeliest is the best guess.
        """
        is_known = self.draft_temperature == "auto" and self.verify == "match"
        return 0.0 if is_known else self.draft_temperature

    @staticmethod
    def of(options: GenerateOptions) -> Request:
        """The request that these options make; those of sampling become its `sampling`."""
        rest: dict[str, Any] = dict(options)
        names = [name for name in SamplingOptions.__annotations__ if name in rest]
        unknown = sorted(set(rest) - set(Request.__annotations__) - set(names))
        if unknown:
            raise TypeError(f"there is no option {', '.join(unknown)}; see GenerateOptions")
        return Request(sampling=Sampling(**{name: rest.pop(name) for name in names}), **rest)

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_tokens is not None and self.max_tokens < 1:
            raise OptionError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if isinstance(self.n_draft, int) and self.n_draft < 1:
            raise OptionError(
                f"n_draft is {self.n_draft}; it must be at least 1, or 'auto'. "
                "To decode without a draft, choose the drafter 'none'"
            )
        rules.rule(self.verify)
        DraftTemperature(self.sampling.temperature, self.draft_temperature)
        if self.grammar is not None and self.json_schema is not None:
            raise OptionError("there are a grammar and a JSON schema; give one of them")
        if self.ignore_eos and (self.grammar is not None or self.json_schema is not None):
            raise OptionError(
                "ignore_eos forbids the tokens that end a text, but under a grammar (or JSON "
                "schema) it is the grammar that ends it; leave one of them out"
            )
        if self.seed is not None and self.seed < 0:
            raise OptionError(f"seed is {self.seed}; it must be 0 or more")

    def _check_types(self) -> None:
        if isinstance(self.n_draft, str):
            if self.n_draft != "auto":
                raise OptionError(
                    f"n_draft is {self.n_draft!r}; it must be a whole number, or 'auto'"
                )
        else:
            object.__setattr__(self, "n_draft", validate.whole("n_draft", self.n_draft))
        for name in ("max_tokens", "seed"):
            if getattr(self, name) is not None:
                validate.whole(name, getattr(self, name))
        for name in ("grammar", "drafter"):
            if getattr(self, name) is not None:
                validate.text(name, getattr(self, name))
        validate.text("verify", self.verify)
        validate.switch("ignore_eos", self.ignore_eos)
        if self.progress is not None and not callable(self.progress):
            raise OptionError(f"progress is {self.progress!r}; it must be a function")
        if not isinstance(self.json_schema, (str, Mapping, bool, type(None))):
            raise OptionError(
                f"json_schema is {self.json_schema!r}; it must be the text of a schema, or a dict"
            )
        validate.texts("dry_sequence_breakers", self.dry_sequence_breakers)
        if not isinstance(self.stop, str):
            validate.texts("stop", self.stop)
