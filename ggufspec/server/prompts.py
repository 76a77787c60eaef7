"""The prompts of a completion as token ids or texts, and the places of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from ggufspec.common.facts import counted
from ggufspec.engine.engine import Engine
from ggufspec.engine.images import decoded, tokens_of
from ggufspec.errors import OptionError, PromptError
from ggufspec.llama.vocab import Vocab
from ggufspec.server.dialects.llama_cpp import MEDIA_MARK, InfillRequest, MediaPrompt
from ggufspec.server.events import Echo
from ggufspec.server.schema import CompletionRequest
from ggufspec.server.service import ServerOptions

Prompt = str | Sequence[int]


def prompts_of(body: CompletionRequest, engine: Engine, server: ServerOptions) -> list[Prompt]:
    """Texts or token ids, each a prompt. Raises PromptError, OptionError."""
    n_text, suffix_first = server.limit(body.max_tokens), server.suffix_first
    infilled = partial(engine.infill_prompt, n_text=n_text, suffix_first=suffix_first)
    if isinstance(body, InfillRequest):
        files = [(each.filename, each.text) for each in body.input_extra]
        return [infilled(body.input_prefix, body.input_suffix, files=files, begun=body.prompt)]
    given: Any = body.prompt
    is_one = isinstance(given, (str, MediaPrompt)) or any(isinstance(each, int) for each in given)
    prompts: list[str | list[int | str] | MediaPrompt] = [given] if is_one else given
    if body.suffix:
        if not all(isinstance(each, str) for each in prompts):
            raise OptionError("'suffix' needs prompts as texts, not as token ids")
        return [infilled(cast("str", each), body.suffix) for each in prompts]
    return [_read(each, engine, add_special=body.add_special_tokens) for each in prompts]


def _read(
    prompt: str | list[int | str] | MediaPrompt, engine: Engine, *, add_special: bool
) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, MediaPrompt):
        return _with_images(prompt, engine, add_special=add_special)
    return joined_tokens(prompt, engine.vocab, add_special=add_special)


def _with_images(prompt: MediaPrompt, engine: Engine, *, add_special: bool) -> list[int]:
    texts, files = prompt.prompt_string.split(MEDIA_MARK), prompt.multimodal_data
    if len(texts) - 1 != len(files):
        raise PromptError(
            f"'prompt_string' has {counted(len(texts) - 1, 'mark')} {MEDIA_MARK}, and "
            f"'multimodal_data' {counted(len(files), 'file')}; mark the place of each file once"
        )
    images = list(map(decoded, files))
    return tokens_of(texts, images, engine.pair.target, add_special=add_special)


def joined_tokens(parts: Sequence[int | str], vocab: Vocab, *, add_special: bool) -> list[int]:
    """The token ids of texts and token ids in one; special tokens only beside a first text."""
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            tokens += vocab.tokenize(part, add_special=add_special and not i, parse_special=True)
        else:
            tokens.append(part)
    return tokens


def echo_of(prompt: str | Sequence[int], tokens: Sequence[int], vocab: Vocab) -> Echo:
    """A prompt as text, and the places of its tokens; control tokens of ids have no text."""
    pieces = [vocab.piece(token) for token in tokens]
    data = prompt.encode() if isinstance(prompt, str) else b"".join(pieces)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at, n_chars, ends = 0, 0, []
    for token, piece in zip(tokens, pieces, strict=True):
        if not piece and data.startswith(name := vocab.shown(token), at):
            piece = name
        elif not data.startswith(piece, at):
            piece = piece.removeprefix(b" ")  # that SentencePiece puts before a text
        n_chars += len(decoder.decode(data[at : at + len(piece)]))
        at += len(piece)
        ends.append(n_chars)
    return Echo(data.decode("utf-8", "replace"), ends)
