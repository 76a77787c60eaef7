"""The options of one generation, their checks, and those that a model file recommends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from ggufspec.common import defaults, validate
from ggufspec.common.progress import NamedProgress
from ggufspec.decoding import verify as rules
from ggufspec.decoding.sampling_options import NUMBERS, SAMPLERS, SAMPLING, Sampling, sampler_name
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
    progress: NamedProgress | None  # ("target", "draft", "costs", "vocabulary" ..., done, of)


@dataclass(frozen=True)
class CheckedOptions:
    """The options of one generation: `of` checks them; nothing else does, nor a `replace`."""

    max_tokens: int | None = None
    n_draft: int | str = defaults.N_DRAFT
    tree: str = defaults.TREE
    draft_temperature: float | None = None
    dry_sequence_breakers: Sequence[str] = defaults.DRY_SEQUENCE_BREAKERS
    grammar: str | None = None
    json_schema: str | Mapping[str, object] | type | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    banned_strings: Sequence[str] = ()
    ignore_eos: bool = False
    shown_tokens: Collection[int] = ()
    min_tokens: int = 0
    max_seconds: float = math.inf
    min_indent: int = 0
    reasoning_budget: int = -1
    context_shift: bool = False
    n_keep: int = 0
    drafter: str | None = None
    prediction: str | Sequence[int] | None = None
    verify: str = defaults.VERIFY
    progress: NamedProgress | None = None
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
        given = CheckedOptions(sampling=Sampling(**sampling), **rest)
        _check(given)
        prediction = given.prediction
        if prediction is not None and not isinstance(prediction, str):
            prediction = validate.tokens("prediction", prediction)
        return replace(
            given,
            n_draft=_checked_n_draft(given.n_draft),
            draft_temperature=_checked_draft_temperature(given),
            stop=_texts("stop", given.stop),
            banned_strings=_texts("banned_strings", given.banned_strings),
            stop_tokens=validate.tokens("stop_tokens", given.stop_tokens),
            prediction=prediction,
            constraint_grammar=_constraint_grammar(given),
        )

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


def _check(given: CheckedOptions) -> None:
    """Raise the OptionError of a value that cannot be used, but for those that `of` converts."""
    for name in ("max_tokens", "seed", "min_tokens"):
        value = getattr(given, name)
        if value is not None and validate.whole(name, value) < 0:
            raise OptionError(f"{name} is {value}; it must be at least 0")
    if validate.whole("reasoning_budget", given.reasoning_budget) < -1:
        raise OptionError(
            f"reasoning_budget is {given.reasoning_budget}; it must be at least 0, or -1: no limit"
        )
    for name in ("grammar", "regex", "drafter"):
        if getattr(given, name) is not None:
            validate.text(name, getattr(given, name))
    if given.prediction is not None:
        if isinstance(given.prediction, Sized) and not len(given.prediction):
            raise OptionError("prediction is empty; give at least one token, or leave it out")
        if given.drafter in ("model", "staged"):
            raise OptionError(
                f"the drafter {given.drafter!r} uses no prediction; use 'auto' or 'ngram' "
                "(drafter, --drafter)"
            )
    if given.tree not in defaults.TREES:
        known = ", ".join(map(repr, defaults.TREES))
        raise OptionError(f"tree is {given.tree!r}; it must be one of {known}")
    rules.rule(validate.text("verify", given.verify))
    validate.Whole(0, MAX_INDENT)("min_indent", given.min_indent)
    if not validate.number("max_seconds", given.max_seconds) >= 0:
        raise OptionError(f"max_seconds is {given.max_seconds}; it must be at least 0")
    validate.switch("ignore_eos", given.ignore_eos)
    validate.switch("context_shift", given.context_shift)
    validate.whole("n_keep", given.n_keep)
    validate.function("progress", given.progress)
    validate.texts("dry_sequence_breakers", given.dry_sequence_breakers)


def _texts(name: str, given: Collection[str] | None) -> Sequence[str]:
    texts = (given,) if isinstance(given, str) else () if given is None else given
    found = validate.texts(name, list(texts) if isinstance(texts, Set) else texts)
    if "" in found:
        raise OptionError(f"a text of {name} is empty; give at least one character")
    return found


def _checked_n_draft(n_draft: int | str) -> int | str:
    if n_draft == "auto":
        return n_draft
    if isinstance(n_draft, str):
        raise OptionError(f"n_draft is {n_draft!r}; it must be a whole number, or 'auto'")
    if validate.whole("n_draft", n_draft) < 1:
        raise OptionError(
            f"n_draft is {n_draft}; it must be at least 1, or 'auto'. "
            "To decode without drafting, use the drafter 'none'"
        )
    return validate.whole("n_draft", n_draft)


def _checked_draft_temperature(given: CheckedOptions) -> float | None:
    """None: the target's; `match` accepts the draft's most likely token most often."""
    if given.draft_temperature is None:
        return 0.0 if given.verify == "match" else None
    found: float = NUMBERS["temperature"].check("draft_temperature", given.draft_temperature)
    return found


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
