"""The options of one generation, their checks, and those that a model file recommends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from ggufspec.common import defaults, validate
from ggufspec.common.option_fields import option, options_of
from ggufspec.common.progress import NamedProgress
from ggufspec.common.validate import Number, OneOf, Whole
from ggufspec.decoding import verify as rules
from ggufspec.decoding.sampling_options import SAMPLERS, SAMPLING, Sampling, sampler_name
from ggufspec.errors import OptionError
from ggufspec.structured import grammar

_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json_schema": grammar.of_json_schema,
    "grammar": grammar.of_grammar,
    "regex": grammar.of_regex,
    "choices": grammar.of_choices,
}
CONSTRAINTS = tuple(_GRAMMARS)  # at most one is given

# What a file recommends: keys of its metadata, and the names of options.
_PREFIX = "general.sampling."
_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "sequence": "samplers",
}
MAX_INDENT = 1000


class GenerateOptions(TypedDict, total=False):
    """The options of one generation; the defaults are those of CheckedOptions and Sampling."""

    # Sampling, by the names of llama.cpp's server; see Sampling.
    temperature: float  # 0: greedy
    dynatemp_range: float  # 0: off
    dynatemp_exponent: float
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    typical_p: float  # 1: off
    top_n_sigma: float  # 0 or less: off
    xtc_probability: float  # 0: off
    xtc_threshold: float  # above 0.5: off
    repeat_last_n: int  # tokens that the penalties look back on; 0: off, -1: all
    repeat_penalty: float  # 1: off
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float  # 0: off
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int  # tokens that DRY looks back on; 0: off, -1: all
    dry_sequence_breakers: Sequence[str]  # texts at which DRY restarts its search
    mirostat: int  # 1, 2; 0: off
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float  # below 0: off
    adaptive_decay: float
    logit_bias: Mapping[int, float]  # added to the logits of tokens; -inf bans one
    samplers: Sequence[str]  # in this order

    # None: until the model stops or the context is full; 0: no text, the prompt is only processed.
    max_tokens: int | None
    n_draft: int | str  # maximum drafted tokens per round; "auto": chosen in each round
    tree: str  # branches in a draft: "auto" (where they pay), "on" (the likeliest nodes), "off"
    draft_temperature: float | None  # None: the target's, but 0 with "match"; 0: greedy
    grammar: str | None  # Lark or GBNF; the text matches its rule `start` or `root`
    json_schema: str | Mapping[str, object] | type | None  # the text is JSON; or a pydantic model
    regex: str | None  # the text matches it from end to end
    choices: Sequence[str] | None  # the text is one of these
    seed: int | None  # None: a random one
    # Texts that end the generation; they are not part of the text.
    stop: str | Collection[str] | None
    stop_tokens: Collection[int] | None  # further token ids that end the generation
    # The text never contains them, in upper or lower case: see BannedStrings.
    banned_strings: Collection[str] | None
    ignore_eos: bool  # ban the tokens that end a text
    shown_tokens: Collection[int]  # control tokens whose names are written into the text
    min_tokens: int  # minimum number of tokens before an end token is allowed
    max_seconds: float  # of generation: the text then ends with its line
    min_indent: int  # the text ends before a line, but its first, with less white space before it
    # Maximum number of tokens of reasoning; then its end mark is forced. -1: no limit. The marks
    # are those of the engine's chat template; no effect if it has none.
    reasoning_budget: int
    # When the context is full, drop the older half of the text but keep the first n_keep tokens
    # (negative: the prompt). Not with a constraint, min_tokens or reasoning_budget.
    context_shift: bool
    n_keep: int
    # None: "auto"; with a fixed n_draft "staged" if the draft has its own draft, else "model".
    drafter: str | None
    # A guess of the text, such as a file before an edit: n-grams draft from it.
    prediction: str | Sequence[int] | None
    verify: str  # "traversal", "rejection", "match"
    progress: NamedProgress | None  # ("target", "draft", "costs", "images" ..., done, of)


def _draft_length(name: str, value: object) -> Any:
    if not isinstance(value, str) and validate.whole(name, value) < 1:
        raise OptionError(
            f"{name} is {value}; it must be at least 1, or 'auto'. "
            "To decode without drafting, use the drafter 'none'"
        )
    return Whole(1, None, {"auto": "auto"})(name, value)


def _rule(name: str, value: object) -> str:
    found = validate.text(name, value)
    rules.rule(found)
    return found


def _seconds(name: str, value: object) -> float:
    if not (found := validate.number(name, value)) >= 0:
        raise OptionError(f"{name} is {found}; it must be at least 0")
    return found


def _texts(name: str, given: object) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else () if given is None else given
    found = validate.texts(name, list(texts) if isinstance(texts, Set) else texts)
    if "" in found:
        raise OptionError(f"a text of {name} is empty; give at least one character")
    return found


def _prediction(name: str, given: object) -> str | tuple[int, ...]:
    if isinstance(given, Sized) and not len(given):
        raise OptionError(f"{name} is empty; give at least one token, or leave it out")
    return given if isinstance(given, str) else validate.tokens(name, given)


_COUNT = Whole(0, None)


@dataclass(frozen=True)
class CheckedOptions:
    """The options of one generation: `of` checks them; nothing else does, nor a `replace`."""

    max_tokens: int | None = option(None, _COUNT)
    n_draft: int | str = option(defaults.N_DRAFT, _draft_length)
    tree: str = option(defaults.TREE, OneOf(defaults.TREES))
    draft_temperature: float | None = option(None, Number(0))
    dry_sequence_breakers: Sequence[str] = option(defaults.DRY_SEQUENCE_BREAKERS, validate.texts)
    grammar: str | None = option(None, validate.text)
    json_schema: str | Mapping[str, object] | type | None = None
    regex: str | None = option(None, validate.text)
    choices: Sequence[str] | None = None
    seed: int | None = option(None, _COUNT)
    stop: Sequence[str] = option((), _texts)
    stop_tokens: Sequence[int] = option((), validate.tokens)
    banned_strings: Sequence[str] = option((), _texts)
    ignore_eos: bool = option(False, validate.switch)
    shown_tokens: Collection[int] = ()
    min_tokens: int = option(0, _COUNT)
    max_seconds: float = option(math.inf, _seconds)
    min_indent: int = option(0, Whole(0, MAX_INDENT))
    reasoning_budget: int = option(-1, Whole(-1, None))
    context_shift: bool = option(False, validate.switch)
    n_keep: int = option(0, validate.whole)
    drafter: str | None = option(None, validate.text)
    prediction: str | Sequence[int] | None = option(None, _prediction)
    verify: str = option(defaults.VERIFY, _rule)
    progress: NamedProgress | None = option(None, validate.function)  # noqa: RUF009
    sampling: Sampling = field(default_factory=Sampling)
    # What the text must match, for GrammarConstraint; None: any text.
    constraint_grammar: str | None = None

    @staticmethod
    def of(options: GenerateOptions) -> CheckedOptions:
        """Check options; those of SAMPLING become `sampling`. Raises OptionError, TypeError."""
        rest: dict[str, Any] = dict(options)
        sampling = {name: rest.pop(name) for name in SAMPLING if name in rest}
        if unknown := sorted(rest.keys() - {each.name for each in fields(CheckedOptions)}):
            raise TypeError(f"there is no option {', '.join(unknown)}; see GenerateOptions")
        for name in rest.keys() & _OPTIONS.keys():
            rest[name] = _OPTIONS[name].checked(name, rest[name])
        given = CheckedOptions(sampling=Sampling(**sampling), **rest)
        if given.prediction is not None and given.drafter in ("model", "staged"):
            raise OptionError(
                f"the drafter {given.drafter!r} uses no prediction; use 'auto' or 'ngram' "
                "(drafter, --drafter)"
            )
        if given.draft_temperature is None and given.verify == "match":
            # It accepts the draft's most likely token most often.
            given = replace(given, draft_temperature=0.0)
        return replace(given, constraint_grammar=_constraint_grammar(given))

    @property
    def n_least(self) -> int:
        """Number of tokens for which the context must have room besides the prompt."""
        return 0 if self.max_tokens == 0 else 1

    def drafter_name(self, *, has_draft: bool) -> str:
        if self.drafter is not None:
            return self.drafter
        if self.n_draft == "auto" or self.prediction is not None:
            return "auto"
        return "model" if has_draft else "none"


_OPTIONS = options_of(CheckedOptions)


def _constraint_grammar(given: CheckedOptions) -> str | None:
    """What the text must match. Raises OptionError."""
    schema = given.json_schema
    is_model = isinstance(schema, type) and hasattr(schema, "model_json_schema")
    if not is_model and not isinstance(schema, (str, Mapping, bool, type(None))):
        raise OptionError(
            f"json_schema is {schema!r}; it must be the text of a schema, a dict, or "
            "a pydantic model"
        )
    if given.choices is not None and not validate.texts("choices", given.choices):
        raise OptionError("choices is empty; give at least one text")
    names = [name for name in CONSTRAINTS if getattr(given, name) is not None]
    if len(names) > 1:
        raise OptionError(f"{' and '.join(names)} are given; give one of them")
    for name in ("ignore_eos", "min_tokens") if names else ():
        if getattr(given, name):
            raise OptionError(
                f"{name} bans the tokens that end a text, but {names[0]} says where it ends; "
                "leave one of them out"
            )
    return _GRAMMARS[names[0]](getattr(given, names[0])) if names else None


class FileSampling(NamedTuple):
    """The sampling options that a file sets, and one line for each value that is ignored."""

    options: GenerateOptions
    notes: tuple[str, ...] = ()


def file_sampling(values: Mapping[str, object]) -> FileSampling:
    """The sampling in the metadata of a file (Header.values), read as llama.cpp does."""
    options: dict[str, Any] = {}
    notes: list[str] = []
    for key, name in _NAMES.items():
        if (value := values.get(_PREFIX + key)) is None:
            continue
        try:
            found: Any = _samplers(value, notes) if name == "samplers" else _number(name, value)
            options[name] = getattr(Sampling(**{name: found}), name)
        except OptionError as error:
            notes.append(f"{_PREFIX}{key} of the file is not used, but the default: {error}")
    return FileSampling(options, tuple(notes))  # type: ignore[arg-type]


def sampling_text(options: GenerateOptions) -> str:
    """The options as text, such as "temperature 0.7, top-p 0.8"."""
    shown = {**options, "samplers": "; ".join(options.get("samplers", ()))}
    return ", ".join(
        f"{name.replace('_', '-')} {value}" for name, value in shown.items() if value != ""
    )


def _number(name: str, value: object) -> float:
    """The value as llama.cpp uses it: six decimals; a top-k below 1 keeps all tokens."""
    try:
        number = math.nan if isinstance(value, bool) else round(float(value), 6)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise OptionError(f"{name} is {repr(value)[:40]}; it must be a number")
    if name in ("top_k", "repeat_last_n", "mirostat") and math.isfinite(number):
        return max(int(number), 0) if name == "top_k" else int(number)
    return number


def _samplers(value: object, notes: list[str]) -> list[str]:
    names = [sampler_name(name) for name in str(value).split(";") if name]
    known = [name for name in names if name in SAMPLERS]
    notes += [
        f"the file asks for the sampler {name[:40]!r}, which is not supported and is left out"
        for name in names
        if name not in known
    ]
    if not known:
        raise OptionError(f"samplers is {repr(value)[:40]}; none of them is supported")
    return known
