"""Reads requests of llama.cpp's own API (completion, infill), and writes their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ggufspec.common.image_files import N_IMAGES_MAX
from ggufspec.decoding.sampling_options import SAMPLING
from ggufspec.engine.logprobs import Logprob, TokenLogprobs
from ggufspec.engine.options import CheckedOptions
from ggufspec.llama.vocab import Vocab
from ggufspec.server import schema
from ggufspec.server.dialects.shared import Answer, Framing, timings
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceDelta, ChoiceEvent, ParsedRequest

_N_FIELDS = 1000
MEDIA_MARK = "<__media__>"
_STREAM = Framing("text/event-stream")


class MediaPrompt(schema.Body):
    """A text with the files of its images, in the order of the marks at their places."""

    kinds = ("media_prompts",)
    prompt_string: str = Field(description=f"Each image is at a {MEDIA_MARK}.")
    multimodal_data: list[str] = Field(
        min_length=1, max_length=N_IMAGES_MAX, description="Files in base64."
    )


class LlamaCompletion(schema.CompletionRequest):
    """A prompt to continue, or several; token ids and texts may be mixed in one."""

    kinds = ("everywhere", "llama_cpp")
    prompt: Annotated[  # type: ignore[assignment]
        str
        | schema.Mixed
        | MediaPrompt
        | Annotated[
            list[str | schema.Mixed | MediaPrompt], Field(min_length=1, max_length=schema.N_PROMPTS)
        ],
        BeforeValidator(schema.texts_in),
    ]
    response_fields: list[str] | None = Field(
        None,
        max_length=_N_FIELDS,
        description="The fields of the response; `a/b` is field b of a.",
    )


class InfillFile(schema.Body):
    """A part of another file."""

    kinds = ("infill_files",)
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaCompletion):
    """A text between two others, for an editor."""

    prompt: str = Field("", description="What is already written of the text.")
    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] = Field(
        [], max_length=_N_FIELDS, description="Parts of other files, which come first."
    )


class LlamaRenderer:
    """The response to a completion; several choices are a list."""

    framing = _STREAM

    def __init__(
        self, body: LlamaCompletion, parsed: ParsedRequest, model: str, vocab: Vocab, n_ctx: int
    ) -> None:
        self._body, self._parsed, self._model = body, parsed, model
        self._vocab, self._n_ctx = vocab, n_ctx
        self._answers = [Answer(i, None) for i in range(len(parsed.prompts) * parsed.n)]

    def add(self, event: ChoiceEvent) -> list[dict[str, Any]]:
        answer = self._answers[event.choice_index]
        answer.add(event)
        if not isinstance(event, ChoiceDelta):
            return [self._whole(answer) | {"content": "", "tokens": []}]
        if not event.text and not event.tokens:
            return []
        part = {
            "index": answer.index,
            "content": event.text,
            "tokens": list(event.tokens),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": len(self._prompt_of(answer)),
        }
        return [part | self._probabilities(event.tokens, event.logprobs)]

    def end(self) -> list[dict[str, Any]]:
        return []

    def body(self) -> Any:
        found = [
            self._chosen(self._whole(each) | self._probabilities(each.tokens, each.logprobs))
            for each in self._answers
        ]
        return found[0] if len(found) == 1 else found

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        return [dict(error.body)]

    def _prompt_of(self, answer: Answer) -> Sequence[int]:
        return self._parsed.prompts[answer.index // self._parsed.n]

    def _whole(self, answer: Answer) -> dict[str, Any]:
        prompt, n = self._prompt_of(answer), answer.stats.n_generated
        is_full = answer.finish_reason == "length" and len(prompt) + n >= self._n_ctx
        kind = "word" if answer.stop is not None else "eos"
        shown = b"".join(map(self._vocab.shown, prompt)).decode("utf-8", "replace")
        return {
            "index": answer.index,
            "content": answer.text,
            "tokens": answer.tokens if self._body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": n,
            "tokens_evaluated": len(prompt),
            "generation_settings": settings(self._parsed.options) | {"n_probs": self._body.n_probs},
            "prompt": shown,
            "has_new_line": "\n" in answer.text,
            "truncated": is_full,
            "stop_type": "limit" if answer.finish_reason == "length" else kind,
            "stopping_word": answer.stop or "",
            "tokens_cached": len(prompt) + n,
            "timings": timings([answer]),
        }

    def _probabilities(
        self, tokens: Sequence[int], found: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        if not self._body.n_probs or not found:
            return {}
        is_sampled = self._body.post_sampling_probs
        name, names = ("prob", "top_probs") if is_sampled else ("logprob", "top_logprobs")

        def entry(each: Logprob) -> dict[str, Any]:
            value = each.logprob or 0.0
            return {
                "id": each.token,
                "token": each.text,
                "bytes": list(each.data),
                name: math.exp(value) if is_sampled else value,
            }

        listed = []
        for each in found:
            top = map(entry, each.top)
            # Tokens that the samplers removed are not listed.
            kept = [one for one in top if one[name] > 0] if is_sampled else list(top)
            listed.append(entry(each.chosen) | {names: kept})
        return {"completion_probabilities": listed}

    def _chosen(self, whole: dict[str, Any]) -> dict[str, Any]:
        """The `response_fields` of a response; those that it does not have are left out."""
        if not self._body.response_fields:
            return whole
        found: dict[str, Any] = {}
        for path in self._body.response_fields:
            value: Any = whole
            for part in path.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found


def settings(options: CheckedOptions) -> dict[str, Any]:
    """The options of a text, with llama.cpp's names and ours."""
    found: dict[str, Any] = {name: getattr(options.sampling, name) for name in SAMPLING}
    found["logit_bias"] = [
        [token, False if bias == -math.inf else bias]
        for token, bias in options.sampling.logit_bias.items()
    ]
    found |= {name: getattr(options, name) for name in ("seed", "drafter", "tree", "verify")}
    found |= {name: getattr(options, name) for name in ("n_keep", "ignore_eos", "min_tokens")}
    n = -1 if options.max_tokens is None else options.max_tokens
    return found | {
        "stop": list(options.stop),
        "max_tokens": options.max_tokens,
        "n_predict": n,
        "draft_n": options.n_draft,
        "n_indent": options.min_indent,
        "grammar": options.grammar or "",
    }
