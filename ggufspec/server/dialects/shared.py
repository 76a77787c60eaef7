"""What the dialects share: the ways from requests to chats, and from events to answers."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, NamedTuple, Protocol

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ggufspec.decoding.stats import Stats
from ggufspec.engine.logprobs import Logprob, TokenLogprobs
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ChoiceFinished
from ggufspec.server.formats.deltas import CallDelta, ChatDelta, ChatParser, TextDelta
from ggufspec.server.schema import ChatRequest, GenerationBody
from ggufspec.server.strict_json import sent_arguments

Document = Mapping[str, Any]
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_STATISTICS = ("n_generated", "n_rounds", "n_drafted", "n_accepted", "tokens_per_second")


def as_chat(body: GenerationBody, **fields: Any) -> ChatRequest:
    """A chat with the shared fields of `body`, and with those of `fields` that are not None.

    Raises RequestValidationError, ApiError.
    """
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}; this API has one answer: leave it out", param="n")
    shared = {name: getattr(body, name) for name in body.model_fields_set}
    shared = {name: shared[name] for name in shared.keys() & GenerationBody.model_fields.keys()}
    given = {name: value for name, value in fields.items() if value is not None}
    for name in shared.keys() & given.keys():
        if shared[name] not in (None, given[name]):
            message = f"{name} is given twice, also by this API's own name for it; give one of them"
            raise ApiError(400, message, param=name)
    try:
        return ChatRequest(**shared | given)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from error


def thinking_variables(wanted: bool | str | None) -> dict[str, bool]:
    """The variables that tell chat templates whether, or how, the model reasons first."""
    names = () if wanted is None else ("enable_thinking", "thinking")
    return dict.fromkeys(names, bool(wanted))


@dataclass
class Part:
    """A part of an answer: text, reasoning or a tool call, whose `text` is its arguments."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    id: str = ""  # if it is a call
    name: str = ""  # if it is a call
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object; completed if they were cut off."""
        found: dict[str, Any] = json.loads(sent_arguments(self.text))
        return found


class _Token(NamedTuple):
    start: int  # in characters of the text
    end: int
    logprobs: TokenLogprobs | None


def _logprobs_of(tokens: Sequence[_Token]) -> list[TokenLogprobs]:
    return [token.logprobs for token in tokens if token.logprobs is not None]


class Step(NamedTuple):
    """An addition to `part`, which contains it already; `is_first`: a new part begins with it."""

    delta: ChatDelta
    part: Part
    is_first: bool
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass
class Answer:
    """One choice. `stats`, `finish_reason` (as OpenAI names it) and `stop` (the stop string that
    ended it) are set once it is finished.
    """

    index: int
    parser: ChatParser | None
    parts: list[Part] = field(default_factory=list)
    n_reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # of the tokens, in characters
    stats: Stats = field(init=False)
    _n_said: int = 0  # characters that have come
    _end: int = 0  # of the last token
    _unsaid: list[_Token] = field(default_factory=list)  # those whose text has not come

    def add(self, event: ChoiceEvent) -> list[Step]:
        """Add an event of this choice; returns its additions to the parts."""
        if isinstance(event, ChoiceFinished):
            steps = self._take(self.parser.finish() if self.parser else [])
            if self.parts and self.parts[-1].kind == "text":
                self.parts[-1].logprobs += _logprobs_of(self._unsaid)
            self.stats = event.completion.stats
            self.finish_reason, self.stop = event.completion.finish_reason, event.completion.stop
            if self.calls and self.finish_reason == "stop" and not self.is_stopped_in_call:
                self.finish_reason = "tool_calls"
            return steps
        self.tokens += event.tokens
        self.drafted += event.drafted
        self.logprobs += event.logprobs
        *starts, self._end = self._end, *event.ends
        self.starts += starts
        self._unsaid += map(_Token, starts, event.ends, event.logprobs or repeat(None))
        if self.parser:
            return self._take(self.parser.push(event.text))
        if not event.text:
            return []
        start, self._n_said = self._n_said, self._n_said + len(event.text)
        return self._take([TextDelta("text", event.text, start, self._n_said)])

    @property
    def text(self) -> str:
        """The content, without reasoning and calls."""
        return self.joined("text")

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind == "call"]

    @property
    def is_stopped_in_call(self) -> bool:
        """Whether a stop string has cut off the arguments of the last call."""
        if self.stop is None or not self.parts or self.parts[-1].kind != "call":
            return False
        try:
            json.loads(self.parts[-1].text)
        except ValueError:
            return True
        return False

    def joined(self, kind: Literal["text", "reasoning"]) -> str:
        return "".join([part.text for part in self.parts if part.kind == kind])

    def statistics(self) -> dict[str, Any]:
        """The statistics that `report_drafted` adds to a response."""
        return {
            "drafted": self.drafted,
            **{name: getattr(self.stats, name) for name in _STATISTICS},
            "prompt_seconds": self.stats.seconds.prompt,
            "generation_seconds": self.stats.seconds.generation,
        }

    def _take(self, deltas: Sequence[ChatDelta]) -> list[Step]:
        steps: list[Step] = []
        for delta in deltas:
            n_before = len(self.parts)
            part = self._part_of(delta)
            part.text += delta.text
            tokens = [] if isinstance(delta, CallDelta) else self._tokens_of(delta)
            found: list[TokenLogprobs] = []
            if part.kind == "text":
                found = _logprobs_of(tokens)
            else:
                self.n_reasoning_tokens += len(tokens)
            part.logprobs += found
            steps.append(Step(delta, part, len(self.parts) > n_before, found))
        return steps

    def _tokens_of(self, delta: TextDelta) -> list[_Token]:
        """The tokens with a character in `delta`; those before, of marks and calls, are dropped."""
        n = bisect_left(self._unsaid, delta.end, key=lambda token: token.start)
        before, self._unsaid = self._unsaid[:n], self._unsaid[n:]
        return [token for token in before if max(token.end, token.start + 1) > delta.start]

    def _part_of(self, delta: ChatDelta) -> Part:
        if isinstance(delta, TextDelta):
            if not self.parts or self.parts[-1].kind != delta.kind:
                self.parts.append(Part(delta.kind))
        elif delta.name is not None:
            self.parts.append(Part("call", id=delta.id or "", name=delta.name))
        else:
            return self.calls[delta.call_index]
        return self.parts[-1]


@dataclass(frozen=True)
class Framing:
    """How the documents of a stream are written. `end`: the bytes after the last one.

    `keep_alive`: bytes for a waiting client; b"": none. `is_named`: the name of each event is the
    `type` of its document.
    """

    media_type: str
    before: bytes = b"data: "
    after: bytes = b"\n\n"
    keep_alive: bytes = b": waiting\n\n"  # a comment, which clients ignore
    end: bytes = b""
    is_named: bool = False

    def frame(self, document: Document) -> bytes:
        name = b"event: %b\n" % document["type"].encode() if self.is_named else b""
        return b"".join([name, self.before, _to_json(document).encode(), self.after])


CHUNKS = Framing("text/event-stream", end=b"data: [DONE]\n\n")
NAMED_EVENTS = Framing("text/event-stream", is_named=True)
JSON_LINES = Framing("application/x-ndjson", before=b"", after=b"\n", keep_alive=b"")


class Renderer(Protocol):
    """Writes the answer to one request, whole or as the documents of a stream."""

    framing: Framing

    def add(self, event: ChoiceEvent) -> Sequence[Document]:
        """Process an event; returns its documents."""

    def end(self) -> Sequence[Document]:
        """The documents after the last event."""

    def body(self) -> Document:
        """The body of a response without streaming, after the last event."""

    def error(self, error: ApiError) -> Sequence[Document]:
        """The last documents of a failed stream."""


def timings(answers: Sequence[Answer]) -> dict[str, Any]:
    """Times and speeds as in llama.cpp's server, summed over the answers."""
    stats = [answer.stats for answer in answers]
    n_reused = sum(each.n_prompt_reused for each in stats)
    n_prompt = sum(each.n_prompt for each in stats) - n_reused
    n_generated = sum(each.n_generated for each in stats)
    return {
        "cache_n": n_reused,
        **_speed("prompt", n_prompt, sum(each.seconds.prompt for each in stats)),
        **_speed("predicted", n_generated, sum(each.seconds.generation for each in stats)),
        "draft_n": sum(each.n_drafted for each in stats),
        "draft_n_accepted": sum(each.n_accepted for each in stats),
    }


def logprob_entries(found: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Log-probabilities in the form of OpenAI's chats and responses."""
    return [
        {**_entry(each.chosen), "top_logprobs": [_entry(top) for top in each.top]} for each in found
    ]


def _entry(found: Logprob) -> dict[str, Any]:
    return {"token": found.text, "logprob": found.logprob, "bytes": list(found.data)}


def _speed(what: str, n: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": n,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / n if n else 0.0,
        f"{what}_per_second": n / seconds if seconds else 0.0,
    }
