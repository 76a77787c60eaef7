"""A server of embeddings: its routes, and the thread that computes them."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal, cast

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ggufspec.errors import OptionError, PromptError, PromptTooLongError
from ggufspec.llama.embedder import Embedder
from ggufspec.llama.vocab import check_tokens
from ggufspec.server.errors import ApiError, server_stopping
from ggufspec.server.metrics import Metrics
from ggufspec.server.prompts import joined_tokens
from ggufspec.server.schema import Body, Mixed, texts_in
from ggufspec.server.service import ServerOptions
from ggufspec.server.texts import queue_full, timed_out

PATHS = ("/embedding", "/embeddings", "/v1/embeddings")
OF_TEXTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_N_TEXTS = 2048  # of a request, as in OpenAI's API
_INT16 = 32760.0  # the largest number with embd_normalize 0

Rows = NDArray[np.float32]  # (n, n_embd): one, or one for each token


class EmbeddingBody(Body):
    """One or several texts, or token ids."""

    kinds = ("everywhere", "embeddings")
    input: Annotated[
        str | Mixed | Annotated[list[str | Mixed], Field(min_length=1, max_length=_N_TEXTS)],
        BeforeValidator(texts_in),
    ]
    model: str | None = Field(None, max_length=1000, description="Ignored.")
    encoding_format: Literal["float", "base64"] | None = None
    embd_normalize: int = Field(
        2, ge=-1, le=100, description="2: to length 1; 1: taxicab; p: p-norm; 0: int16; -1: none."
    )

    @property
    def texts(self) -> Sequence[str | Sequence[int | str]]:
        is_one = isinstance(self.input, str) or any(isinstance(each, int) for each in self.input)
        return cast("Sequence[str | Sequence[int | str]]", [self.input] if is_one else self.input)


class EmbeddingService:
    """A model that is served for its embeddings. One thread computes them, text by text."""

    def __init__(self, embedder: Embedder, options: ServerOptions) -> None:
        self.embedder, self.options, self.metrics = embedder, options, Metrics()
        self.started_at = int(time.time())
        self._thread = ThreadPoolExecutor(1, "ggufspec-embeddings")
        self._n_open = 0
        self._is_stopping = False

    async def rows(self, texts: Sequence[Sequence[int]]) -> Sequence[Rows]:
        """The embeddings of texts in token ids. Raises ApiError, DecodeError."""
        if self._is_stopping:
            raise server_stopping()
        if self._n_open > self.options.n_waiting_max:
            raise queue_full(self._n_open - 1, 1.0)
        self._n_open += 1
        loop, timeout = asyncio.get_running_loop(), self.options.timeout
        found = [loop.run_in_executor(self._thread, self.embedder.embed, each) for each in texts]
        try:
            return await asyncio.wait_for(asyncio.gather(*found), timeout)
        except asyncio.TimeoutError as error:
            raise timed_out(timeout) from error
        finally:
            self._n_open -= 1

    def tokens(self, text: str | Sequence[int | str]) -> Sequence[int]:
        """The token ids of a text, with those that the model expects around it.

        Raises PromptError.
        """
        parts = [text] if isinstance(text, str) else text
        tokens = joined_tokens(parts, self.embedder.vocab, add_special=True)
        check_tokens(tokens, self.embedder.vocab)
        if not tokens:
            raise PromptError("the input is empty; give at least one character or token")
        if len(tokens) > (n_ctx := self.embedder.n_ctx):
            message = f"the input has {len(tokens):,} tokens, the context {n_ctx:,}; shorten it"
            raise PromptTooLongError(message, len(tokens), n_ctx)
        return tokens

    def finish(self) -> None:
        """Refuse new requests."""
        self._is_stopping = True

    def abort(self) -> None:
        """Do the same as `finish`, and drop texts that have not begun."""
        self.finish()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Wait for the text under way, and free the model."""
        self._thread.shutdown(cancel_futures=True)
        self.embedder.close()


def add_embeddings(router: APIRouter, service: EmbeddingService) -> None:
    embedder, alias = service.embedder, service.options.alias
    facts = {"n_ctx": embedder.n_ctx, "n_embd": embedder.model.n_embd_out}
    model = {"id": alias, "object": "model", "created": service.started_at, "owned_by": "ggufspec"}

    async def rows_of(body: EmbeddingBody) -> tuple[Sequence[Rows], int]:
        tokens = await run_in_threadpool(lambda: list(map(service.tokens, body.texts)))
        norm = -1 if embedder.pooling == "none" else body.embd_normalize
        rows = [normalized(each, norm) for each in await service.rows(tokens)]
        return rows, sum(map(len, tokens))

    @router.post("/embedding")
    @router.post("/embeddings")
    async def embedding(body: EmbeddingBody) -> Response:
        """The embeddings of texts, as in llama.cpp's server."""
        rows, _ = await rows_of(body)
        found = ({"index": i, "embedding": each.tolist()} for i, each in enumerate(rows))
        return await run_in_threadpool(lambda: JSONResponse(list(found)))

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody) -> Response:
        """The embeddings of texts, as in OpenAI's API."""
        if embedder.pooling == "none":
            raise OptionError(
                "this server does not pool the embeddings of tokens; start it with --pooling mean, "
                "cls or last, or send the request to /embedding"
            )
        rows, n_tokens = await rows_of(body)
        is_text = body.encoding_format == "base64"
        form = {"encoding_format": "base64"} if is_text else {}  # as llama.cpp's server says it
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": b64encode(np.array(row, "<f4").tobytes()).decode() if is_text else row,
                **form,
            }
            for i, (row,) in enumerate(each.tolist() for each in rows)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        whole = {"object": "list", "model": alias, "data": data, "usage": usage}
        return await run_in_threadpool(lambda: JSONResponse(whole))

    @router.get("/v1/models")
    async def models() -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [{**model, "ggufspec": facts}]})

    @router.get("/health")
    async def health() -> Response:
        """Report "ok"."""
        return JSONResponse({"status": "ok"})


def refuse(router: APIRouter, paths: Sequence[str], message: str) -> None:
    """Answer requests to paths with status 501."""

    async def refused() -> Response:
        # OpenAI's clients retry a 501 by default.
        headers = {"x-should-retry": "false"}
        raise ApiError(501, message, code="not_supported", headers=headers)

    for path in paths:
        router.post(path, include_in_schema=False)(refused)


def normalized(rows: Rows, norm: int) -> Rows:
    """Rows of a norm, as llama.cpp's embd_normalize: see EmbeddingBody."""
    if norm < 0:
        return rows
    sizes = np.abs(rows.astype(np.float64))
    of_int16 = sizes.max(axis=1) / _INT16
    lengths = (sizes**norm).sum(axis=1) ** (1 / norm) if norm else of_int16
    scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    scaled: Rows = (rows * scale[:, None]).astype(np.float32)
    return scaled
