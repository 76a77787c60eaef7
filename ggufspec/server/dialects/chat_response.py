"""Writes OpenAI's chat completions and completions, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from operator import mul
from typing import Any

from ggufspec import __version__
from ggufspec.server.dialects.shared import CHUNKS, Answer, logprob_entries, timings
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceDelta, ChoiceEvent, ParsedRequest
from ggufspec.server.formats.deltas import ChatDelta, TextDelta
from ggufspec.server.schema import ChatRequest, GenerationBody

FINGERPRINT = f"ggufspec-{__version__}"


class CompletionRenderer:
    """The response to a chat or a completion; only this dialect allows several choices."""

    framing = CHUNKS

    def __init__(self, body: GenerationBody, parsed: ParsedRequest, model: str) -> None:
        self._is_chat = is_chat = isinstance(body, ChatRequest)
        self._with_logprobs = parsed.n_top is not None
        self._with_drafted, self._with_tokens = body.report_drafted, body.return_tokens
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._n = parsed.n
        self._has_role: set[int] = set()  # choices whose chunk with the role was made
        self._choices = [
            Answer(i, parsed.parser() if parsed.parser else None)
            for i in range(len(parsed.prompts) * parsed.n)
        ]
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def add(self, event: ChoiceEvent) -> list[dict[str, Any]]:
        choice = self._choices[event.choice_index]
        deltas = [step.delta for step in choice.add(event)]
        tokens = event if isinstance(event, ChoiceDelta) else None
        if tokens and (self._with_drafted or self._with_logprobs or self._with_tokens):
            deltas = deltas or [TextDelta("text", "")]
        chunks = self._role_chunks(choice) if deltas or not tokens else []
        # If there are several chunks, the first has the log-probabilities and tokens.
        for i, delta in enumerate(deltas):
            chunks.append(self._part_chunk(choice, delta, None if i else tokens))
        if not tokens:
            last = self._choice(choice, {}, finish_reason=choice.finish_reason)
            chunks.append(self._chunk([last], choice.statistics() | {"drafted": []}))
            chunks[-1]["timings"] = timings([choice])
        return chunks

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        cut = [
            self._choice(choice, {}, finish_reason="error")
            for choice in self._choices
            if choice.finish_reason is None
        ]
        return [{**error.body, **self._chunk(cut)}]

    def body(self) -> dict[str, Any]:
        choices = [self._body_of(choice) for choice in self._choices]
        body = {**self._head, "choices": choices, "usage": self._usage()}
        body["timings"] = timings(self._choices)
        if self._with_drafted:
            body["ggufspec"] = [choice.statistics() for choice in self._choices]
        return body

    def end(self) -> list[dict[str, Any]]:
        if not self._with_usage:
            return []
        more = {"usage": self._usage(), "timings": timings(self._choices)}
        return [self._chunk([]) | more]

    def _usage(self) -> dict[str, Any]:
        stats = [choice.stats for choice in self._choices]
        firsts = stats[:: self._n]
        n_prompt = sum(each.n_prompt for each in firsts)
        n_generated = sum(each.n_generated for each in stats)
        n_drafted = sum(each.n_drafted for each in stats)
        n_accepted = sum(each.n_accepted for each in stats)
        if all("n_predicted" in each.notes for each in stats):  # only with a prediction
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

    def _body_of(self, choice: Answer) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, len(choice.logprobs)),
            "finish_reason": choice.finish_reason,
        }
        if self._with_tokens:
            body["tokens"] = choice.tokens
        if not self._is_chat:
            return {**body, "text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if reasoning := choice.joined("reasoning"):
            message["reasoning_content"] = reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for call in choice.calls
            ]
        return {**body, "message": message}

    def _part_chunk(
        self, choice: Answer, part: ChatDelta, event: ChoiceDelta | None
    ) -> dict[str, Any]:
        found = {"tokens": list(event.tokens) if event else []} if self._with_tokens else {}
        logprobs = self._logprobs(choice, len(event.logprobs) if event else 0)
        drafted = {"drafted": list(event.drafted)} if event else None
        made = self._choice(choice, _delta_body(part), logprobs=logprobs, **found)
        return self._chunk([made], drafted)

    def _role_chunks(self, choice: Answer) -> list[dict[str, Any]]:
        """The first chunk of a chat's choice, which has only the role; empty if already made."""
        if choice.index in self._has_role or not self._is_chat:
            return []
        self._has_role.add(choice.index)
        return [self._chunk([self._choice(choice, {"role": "assistant", "content": None})])]

    def _choice(self, choice: Answer, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        body = {"index": choice.index, "logprobs": None, "finish_reason": None, **more}
        part = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return body | part

    def _chunk(
        self, choices: list[Any], statistics: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._is_chat:
            chunk["object"] = "chat.completion.chunk"
        if self._with_usage:
            chunk["usage"] = None
        if self._with_drafted:
            chunk["ggufspec"] = statistics or {"drafted": []}
        return chunk

    def _logprobs(self, choice: Answer, n: int) -> dict[str, Any] | None:
        """Those of the last `n` tokens of a choice."""
        if not self._with_logprobs:
            return None
        first = len(choice.logprobs) - n
        found = choice.logprobs[first:]
        if self._is_chat:
            return {"content": logprob_entries(found), "refusal": None}
        return {
            "tokens": [each.chosen.text for each in found],
            "token_logprobs": [each.chosen.logprob for each in found],
            # Reversed, so that of two tokens with the same text the more likely one is kept.
            "top_logprobs": [
                None
                if each.chosen.logprob is None
                else {top.text: top.logprob for top in each.top[::-1]}
                for each in found
            ],
            "text_offset": choice.starts[first:],
        }


def _delta_body(part: ChatDelta) -> dict[str, Any]:
    if isinstance(part, TextDelta):
        return {"content" if part.kind == "text" else "reasoning_content": part.text}
    function, call = {"arguments": part.text}, {}
    if part.name is not None:
        function["name"] = part.name
        call = {"id": part.id, "type": "function"}
    return {"tool_calls": [{"index": part.call_index, **call, "function": function}]}
