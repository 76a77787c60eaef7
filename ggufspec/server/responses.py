"""Builds OpenAI's response bodies, whole or in chunks, from the events of a request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from ggufspec import __version__
from ggufspec.decoding.stats import Stats
from ggufspec.engine.logprobs import Logprob, TokenLogprobs
from ggufspec.server.events import ChoiceDelta, ChoiceFinished, ParsedRequest
from ggufspec.server.formats.deltas import ChatDelta, ChatParser, ContentDelta, ReasoningDelta
from ggufspec.server.schema import ChatRequest, GenerationBody

_STATISTICS = ("n_generated", "n_rounds", "n_drafted", "n_accepted", "tokens_per_second")
FINGERPRINT = f"ggufspec-{__version__}"


@dataclass
class _Choice:
    index: int
    parser: ChatParser | None
    text: str = ""
    reasoning: str = ""
    n_reasoning_tokens: int = 0
    has_role: bool = False  # whether a chunk with the role was made
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: Stats = field(init=False)  # once it is finished

    def take(self, deltas: Sequence[ChatDelta], n_tokens: int = 0) -> None:
        """Add what the parser found in so many tokens."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.text += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif delta.name is not None:
                function = {"name": delta.name, "arguments": delta.text}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.call_index]["function"]["arguments"] += delta.text
        if deltas and all(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.n_reasoning_tokens += n_tokens


class ResponseBuilder:
    """The response to one request, whole or in chunks."""

    def __init__(self, body: GenerationBody, parsed: ParsedRequest, model: str) -> None:
        self._is_chat = is_chat = isinstance(body, ChatRequest)
        self._with_logprobs = parsed.n_top is not None
        self._with_drafted, self._with_tokens = body.report_drafted, body.return_tokens
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._n = parsed.n
        self._choices = [
            _Choice(i, parsed.parser() if parsed.parser else None)
            for i in range(len(parsed.prompts) * parsed.n)
        ]
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def add(self, event: ChoiceDelta | ChoiceFinished) -> list[dict[str, Any]]:
        """Take in an event; returns the chunks for it."""
        choice = self._choices[event.choice_index]
        if isinstance(event, ChoiceDelta):
            choice.tokens += event.tokens
            choice.drafted += event.drafted
            choice.logprobs += event.logprobs
            offset = len(choice.text)
            deltas: list[ChatDelta] = [ContentDelta(event.text)] if event.text else []
            if choice.parser:
                deltas = choice.parser.push(event.text)
            choice.take(deltas, len(event.tokens))
            if not deltas and (self._with_drafted or self._with_logprobs or self._with_tokens):
                deltas = [ContentDelta("")]
            # What the tokens say is in the first chunk of several.
            chunks = self._role_chunks(choice) if deltas else []
            for i, delta in enumerate(deltas):
                chunks.append(self._part_chunk(choice, delta, None if i else event, offset))
            return chunks
        chunks = self._role_chunks(choice)
        if choice.parser:
            deltas = choice.parser.finish()
            choice.take(deltas)
            chunks += [self._part_chunk(choice, delta) for delta in deltas]
        choice.stats = event.completion.stats
        choice.finish_reason = event.completion.finish_reason
        if choice.calls and choice.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        statistics = self._statistics(choice) | {"drafted": []}
        last = self._chunk(choice, {}, statistics, finish_reason=choice.finish_reason)
        return [*chunks, last | {"timings": self._timings([choice])}]

    def error_chunk(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream that fails: the error, and the choices that it cuts short."""
        cut = [
            self._choice(choice, {}, finish_reason="error")
            for choice in self._choices
            if choice.finish_reason is None
        ]
        return {**error, **self._chunk_of(cut, None)}

    def body(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choices = [self._body_of(choice) for choice in self._choices]
        body = {**self._head, "choices": choices, "usage": self._usage()}
        body["timings"] = self._timings(self._choices)
        if self._with_drafted:
            body["ggufspec"] = [self._statistics(choice) for choice in self._choices]
        return body

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk of a stream, if it was requested."""
        if not self._with_usage:
            return None
        chunk = self._chunk_of([], None) | {"usage": self._usage()}
        return chunk | {"timings": self._timings(self._choices)}

    def _timings(self, choices: Sequence[_Choice]) -> dict[str, Any]:
        """Where the time went, as llama.cpp's server reports it, summed over the choices."""
        stats = [choice.stats for choice in choices]
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

    def _usage(self) -> dict[str, Any]:
        """Token counts; the prompt of several choices counts once."""
        stats = [choice.stats for choice in self._choices]
        firsts = stats[:: self._n]
        n_prompt = sum(each.n_prompt for each in firsts)
        n_generated = sum(each.n_generated for each in stats)
        n_drafted = sum(each.n_drafted for each in stats)
        n_accepted = sum(each.n_accepted for each in stats)
        if all("n_predicted" in each.notes for each in stats):  # the request has a prediction
            n_each = [each.notes["n_predicted"] for each in stats]
            shares = [each.notes["predicted_acceptance"] for each in stats]
            n_drafted, n_accepted = int(sum(n_each)), round(sum(map(mul, n_each, shares)))
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.n_prompt_reused for each in firsts),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": n_accepted,
                "rejected_prediction_tokens": n_drafted - n_accepted,
                "reasoning_tokens": sum(each.n_reasoning_tokens for each in self._choices),
                "audio_tokens": 0,
            },
        }

    def _body_of(self, choice: _Choice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice.logprobs, 0),
            "finish_reason": choice.finish_reason,
        }
        if self._with_tokens:
            body["tokens"] = choice.tokens
        if not self._is_chat:
            return {**body, "text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = choice.calls
        return {**body, "message": message}

    def _part_chunk(
        self, choice: _Choice, part: ChatDelta, event: ChoiceDelta | None = None, offset: int = 0
    ) -> dict[str, Any]:
        """A chunk with a part of the text, and what the tokens of an event say."""
        found = {"tokens": list(event.tokens) if event else []} if self._with_tokens else {}
        logprobs = self._logprobs(event.logprobs if event else [], offset)
        drafted = {"drafted": list(event.drafted)} if event else None
        return self._chunk(choice, _delta_body(part), drafted, logprobs=logprobs, **found)

    def _role_chunks(self, choice: _Choice) -> list[dict[str, Any]]:
        """The first chunk of a choice of a chat has the role, and nothing else."""
        if choice.has_role or not self._is_chat:
            return []
        choice.has_role = True
        return [self._chunk(choice, {"role": "assistant", "content": None})]

    def _chunk(
        self,
        choice: _Choice,
        delta: Mapping[str, Any],
        statistics: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        return self._chunk_of([self._choice(choice, delta, **more)], statistics)

    def _choice(self, choice: _Choice, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        body = {"index": choice.index, "logprobs": None, "finish_reason": None, **more}
        part = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return body | part

    def _chunk_of(self, choices: list[Any], statistics: dict[str, Any] | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._is_chat:
            chunk["object"] = "chat.completion.chunk"
        if self._with_usage:
            chunk["usage"] = None
        if self._with_drafted:
            chunk["ggufspec"] = statistics or {"drafted": []}
        return chunk

    def _statistics(self, choice: _Choice) -> dict[str, Any]:
        return {
            "drafted": choice.drafted,
            **{name: getattr(choice.stats, name) for name in _STATISTICS},
            "prompt_seconds": choice.stats.seconds.prompt,
            "generation_seconds": choice.stats.seconds.generation,
        }

    def _logprobs(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._is_chat:
            return {
                "content": [
                    {**_entry(each.chosen), "top_logprobs": [_entry(top) for top in each.top]}
                    for each in found
                ],
                "refusal": None,
            }
        offsets = []
        for each in found:
            offsets.append(offset)
            offset += len(each.chosen.data.decode("utf-8", "replace"))
        return {
            "tokens": [each.chosen.text for each in found],
            "token_logprobs": [each.chosen.logprob for each in found],
            # Reversed: of two tokens with the same text, the more likely one is kept.
            "top_logprobs": [
                None
                if each.chosen.logprob is None
                else {top.text: top.logprob for top in each.top[::-1]}
                for each in found
            ],
            "text_offset": offsets,
        }


def _delta_body(part: ChatDelta) -> dict[str, Any]:
    if isinstance(part, ContentDelta):
        return {"content": part.text}
    if isinstance(part, ReasoningDelta):
        return {"reasoning_content": part.text}
    function, call = {"arguments": part.text}, {}
    if part.name is not None:
        function["name"] = part.name
        call = {"id": part.id, "type": "function"}
    return {"tool_calls": [{"index": part.call_index, **call, "function": function}]}


def _entry(found: Logprob) -> dict[str, Any]:
    return {"token": found.text, "logprob": found.logprob, "bytes": list(found.data)}


def _speed(what: str, n: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": n,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / n if n else 0.0,
        f"{what}_per_second": n / seconds if seconds else 0.0,
    }
