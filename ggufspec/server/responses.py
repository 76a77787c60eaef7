"""What the worker tells -> the bodies that OpenAI's clients read. Knows JSON, no HTTP."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggufspec import __version__
from ggufspec.decoding.stats import Stats
from ggufspec.server.logprobs import Logprob, TokenLogprobs
from ggufspec.server.tools import ToolReader
from ggufspec.server.worker import Ended, Piece

FINGERPRINT = f"ggufspec-{__version__}"


@dataclass(frozen=True)
class Form:
    """How an answer is told: as a chat or not, to which model, and what besides the text."""

    model: str
    is_chat: bool
    with_usage: bool = False  # at the end of a stream
    reports: bool = False  # who wrote each token
    with_logprobs: bool = False
    reads_tools: bool = False


@dataclass
class Choice:
    """One text, as it comes."""

    text: str = ""
    is_begun: bool = False  # its first chunk is told
    reader: ToolReader | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: Stats | None = None


class Answer:
    """The choices of one request, and their forms: whole, or in chunks."""

    def __init__(self, form: Form, n_prompts: int, n: int) -> None:
        self._form = form
        self._n = n
        self._choices = [
            Choice(reader=ToolReader() if form.reads_tools else None) for _ in range(n_prompts * n)
        ]
        prefix = "chatcmpl" if form.is_chat else "cmpl"
        kind = "chat.completion" if form.is_chat else "text_completion"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": form.model,
            "system_fingerprint": FINGERPRINT,
        }
        if form.is_chat:
            self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        else:
            self._chunk_head = self._head

    @property
    def texts(self) -> list[str]:
        """What was said in each choice."""
        return [choice.text for choice in self._choices]

    def add(self, event: Piece | Ended) -> Iterator[dict[str, Any]]:
        """Take in what is new; yields the chunks that tell it."""
        choice = self._choices[event.which]
        if isinstance(event, Piece):
            choice.drafted += event.drafted
            choice.logprobs += event.logprobs
            said = choice.reader.push(event.text) if choice.reader else event.text
            offset = len(choice.text)
            choice.text += said
            if said or self._form.reports or self._form.with_logprobs:
                yield self._chunk(event.which, said, event, offset=offset)
            return
        if choice.reader:
            said, choice.calls = choice.reader.finish()
            choice.text += said
            if said or choice.calls:
                yield self._chunk(event.which, said, None, calls=choice.calls)
        choice.stats = event.completion.stats
        choice.finish_reason = "tool_calls" if choice.calls else event.completion.finish_reason
        yield self._last_chunk(event.which, choice)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._whole_choice(i, choice) for i, choice in enumerate(self._choices)]
        body = {**self._head, "choices": choices, "usage": self.usage()}
        if self._form.reports:
            body["ggufspec"] = [self._report(choice) for choice in self._choices]
        return body

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk, where it was asked for."""
        if not self._form.with_usage:
            return None
        return {**self._chunk_head, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """What was read and written; a prompt counts once, whatever is made of it."""
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        firsts = [choice.stats for choice in self._choices[:: self._n] if choice.stats is not None]
        n_prompt = sum(each.n_prompt for each in firsts)
        n_generated = sum(each.n_generated for each in stats)
        n_accepted = sum(each.n_accepted for each in stats)
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
                "rejected_prediction_tokens": sum(each.n_drafted for each in stats) - n_accepted,
                "reasoning_tokens": 0,
                "audio_tokens": 0,
            },
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.logprobs, 0)
        told = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if not self._form.is_chat:
            return {**told, "text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = choice.calls
        return {**told, "message": message}

    def _chunk(
        self,
        index: int,
        said: str,
        piece: Piece | None,
        *,
        offset: int = 0,
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        logprobs = self._logprobs(piece.logprobs if piece else [], offset)
        told: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": None}
        if self._form.is_chat:
            told["delta"] = {**self._role(index), "content": said}
            if calls:
                told["delta"]["tool_calls"] = [{"index": i, **c} for i, c in enumerate(calls)]
        else:
            told["text"] = said
        return self._framed([told], {"drafted": list(piece.drafted)} if piece else None)

    def _last_chunk(self, index: int, choice: Choice) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "logprobs": None}
        told.update({"delta": self._role(index)} if self._form.is_chat else {"text": ""})
        told["finish_reason"] = choice.finish_reason
        return self._framed([told], self._report(choice) | {"drafted": []})

    def _role(self, index: int) -> dict[str, str]:
        """The first chunk of a choice says whose it is."""
        choice = self._choices[index]
        is_first, choice.is_begun = not choice.is_begun, True
        return {"role": "assistant"} if is_first else {}

    def _framed(self, choices: list[Any], report: dict[str, Any] | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._chunk_head, "choices": choices}
        if self._form.with_usage:
            chunk["usage"] = None
        if self._form.reports and report is not None:
            chunk["ggufspec"] = report
        return chunk

    def _report(self, choice: Choice) -> dict[str, Any]:
        stats = choice.stats
        if stats is None:
            return {"drafted": choice.drafted}
        return {
            "drafted": choice.drafted,
            "n_generated": stats.n_generated,
            "n_rounds": stats.n_rounds,
            "n_drafted": stats.n_drafted,
            "n_accepted": stats.n_accepted,
            "tokens_per_second": stats.tokens_per_second,
            "prompt_seconds": stats.seconds.prompt,
            "generation_seconds": stats.seconds.generation,
        }

    def _logprobs(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if not self._form.with_logprobs:
            return None
        if self._form.is_chat:
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
            offset += each.chosen.n_chars
        return {
            "tokens": [each.chosen.text for each in found],
            "token_logprobs": [each.chosen.logprob for each in found],
            # Of two tokens with one text, the likelier is told.
            "top_logprobs": [{top.text: top.logprob for top in each.top[::-1]} for each in found],
            "text_offset": offsets,
        }


def _entry(found: Logprob) -> dict[str, Any]:
    return {"token": found.text, "logprob": found.logprob, "bytes": list(found.data)}
