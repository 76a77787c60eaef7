"""The routes that generate no text: tokens, slots, the page, the model and the server's state."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response

from ggufspec.engine import session_file
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.prompt_cache import CachedText
from ggufspec.engine.slots import Slot, Slots
from ggufspec.errors import CacheError, SessionError
from ggufspec.llama.vocab import Vocab
from ggufspec.server import schema
from ggufspec.server.dialects.chat_response import FINGERPRINT
from ggufspec.server.dialects.llama_cpp import MEDIA_MARK, settings
from ggufspec.server.errors import ApiError, log_error
from ggufspec.server.requests import applied_template, check_scales
from ggufspec.server.service import Service, default_options

T = TypeVar("T")
_MOST_NAME = 200  # bytes; leaves room for the suffix of whole_file


class SlotFile(schema.Body):
    """The file of a slot that is saved or restored, as in llama.cpp's server."""

    filename: str | None = Field(None, max_length=1000, description="In --slot-save-path.")


class TokenizeRequest(schema.Body):
    """A text to tokenize."""

    kinds = ("tokenize",)
    content: str
    add_special: bool = Field(False, description="Begin with the BOS token.")
    parse_special: bool = Field(True, description="Parse names of special tokens as those tokens.")
    with_pieces: bool = Field(False, description="Return the text of each token, or its bytes.")


class DetokenizeRequest(schema.Body):
    """Token ids to turn into text."""

    tokens: list[schema.TokenId] = Field(fail_fast=True)


def add_tokenization(router: APIRouter, service: Service) -> None:
    vocab = service.engine.vocab

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Convert a text to token ids."""
        tokens = await run_in_threadpool(
            vocab.tokenize,
            body.content,
            add_special=body.add_special,
            parse_special=body.parse_special,
        )
        found = [_with_piece(vocab, each) for each in tokens] if body.with_pieces else tokens
        return JSONResponse({"tokens": found})

    @router.post("/apply-template")
    async def apply_template(body: schema.ChatRequest) -> Response:
        """Write a conversation with the chat template, as llama.cpp's server does."""
        prompt = await run_in_threadpool(applied_template, body, service.engine, service.options)
        return JSONResponse({"prompt": prompt})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Name the first and the last token, and the chat template, as vLLM's server does."""
        return JSONResponse(_tokenizer(service))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Convert token ids to a text; control tokens are left out."""
        if wrong := [token for token in body.tokens if token >= vocab.n_tokens]:
            message = f"token {wrong[0]} does not exist; ids are 0 to {vocab.n_tokens - 1:,}"
            raise ApiError(400, message, param="tokens")
        pieces = await run_in_threadpool(lambda: [*map(vocab.piece, body.tokens)])
        text = b"".join(pieces).decode("utf-8", "replace")
        return JSONResponse({"content": text, "prompt": text})  # names of llama.cpp and vLLM


def add_slots(router: APIRouter, service: Service) -> None:
    @router.get("/slots")
    async def listed(fail_on_no_slot: str | None = None) -> Response:
        """List the slots, as llama.cpp's server does."""
        engine = service.engine
        found = [
            {
                "id": i,
                "n_ctx": engine.n_ctx,
                "speculative": engine.pair.draft is not None,
                "is_processing": slot.is_used,
                "n_prompt_tokens": slot.n_prompt,
                "n_tokens": slot.target.n_held,
            }
            for i, slot in enumerate(engine.pair.slots)
        ]
        if fail_on_no_slot is not None and all(each["is_processing"] for each in found):
            raise ApiError(503, "all slots are in use", code="unavailable")
        return JSONResponse(found)

    @router.post("/slots/{id_slot}")
    async def slots(
        id_slot: str, action: str | None = None, body: SlotFile | None = None
    ) -> Response:
        """Save the text of a slot to a file, restore or erase it, as llama.cpp's server does."""
        sent = body or SlotFile.model_construct()
        return JSONResponse(await _slot_action(service, id_slot, action, sent))


def add_information(router: APIRouter, service: Service) -> None:
    engine, built_in = service.engine, page()
    model = {
        "id": service.options.alias,
        "object": "model",
        "created": service.started_at,
        "owned_by": "ggufspec",
        "max_model_len": engine.n_ctx,  # vLLM's name
        "ggufspec": {
            "chat": engine.chat_template is not None,
            "draft": engine.pair.draft is not None,
            "images": engine.pair.target.projector is not None,
            "n_ctx": engine.n_ctx,
            "n_vocab": engine.vocab.n_tokens,
        },
    }

    @router.get("/v1/models")
    async def models() -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describe the model; any name is accepted."""
        return JSONResponse(model)

    @router.get("/health")
    async def health() -> Response:
        """Report "ok"; or, with status 503, "stopping", "stalled" or "failed"."""
        status = service.texts.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @router.get("/props")
    async def properties() -> Response:
        """Describe model, slots and default options, as llama.cpp's server does."""
        return JSONResponse(_properties(service))

    @router.get("/lora-adapters")
    async def lora_adapters() -> Response:
        """List the LoRA adapters and their scales, as llama.cpp's server does."""
        adapters = enumerate(engine.pair.target.model.adapters)
        return JSONResponse(
            [{"id": i, "path": each.path.name, "scale": each.scale} for i, each in adapters]
        )

    @router.post("/lora-adapters")
    async def set_lora_adapters(body: list[schema.AdapterScale]) -> Response:
        """Accept the scales that the server was started with; others are refused."""
        check_scales(body, engine)
        return JSONResponse({"success": True})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Report metrics for Prometheus."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except TypeError:  # for a version that is no number
            encode, content_type = choose_encoder("")
        service.metrics.observe_threads(engine.pair.threads)
        headers = {
            "content-type": content_type,
            "process-start-time-unix": str(service.started_at),  # as llama.cpp's server
        }
        return Response(encode(service.metrics.registry), headers=headers)

    @router.get("/", include_in_schema=False)
    async def built_in_page() -> Response:
        return built_in


def _with_piece(vocab: Vocab, token: int) -> dict[str, object]:
    """A token with its text, or with its bytes if they are not UTF-8, as in llama.cpp."""
    data = vocab.piece(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def _tokenizer(service: Service) -> dict[str, Any]:
    vocab, template = service.engine.vocab, service.engine.chat_template
    return {
        "bos_token": vocab.special_text(vocab.bos),
        "eos_token": vocab.special_text(vocab.eos),
        "chat_template": None if template is None else template.source,
    }


def _properties(service: Service) -> dict[str, Any]:
    """As in llama.cpp's server, but with file names instead of paths."""
    engine, options, texts = service.engine, service.options, _tokenizer(service)
    defaults = replace(
        CheckedOptions.of(default_options(engine, options)), max_tokens=options.max_tokens
    )
    return {
        "default_generation_settings": {"n_ctx": engine.n_ctx, "params": settings(defaults)},
        "total_slots": engine.n_slots,
        "model_alias": options.alias,
        "model_path": engine.pair.target.model.path.name,
        **texts,
        "chat_template": texts["chat_template"] or "",
        "media_marker": MEDIA_MARK,
        "modalities": {"vision": engine.pair.target.projector is not None, "audio": False},
        "build_info": FINGERPRINT,
    }


def page() -> HTMLResponse:
    """The page with its scripts in it; its policy allows these by hash, and no other host."""
    folder = files("ggufspec.server")
    html = folder.joinpath("page.html").read_text(encoding="utf-8")
    for name in re.findall(r'<script src="([\w.]+)"></script>', html):
        script = folder.joinpath(name).read_text(encoding="utf-8")
        html = html.replace(f'<script src="{name}"></script>', f"<script>{script}</script>")
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        f"script-src {_hashes_of(html, 'script')}",
        f"style-src {_hashes_of(html, 'style')}",
        "img-src data:",
        "require-trusted-types-for 'script'",  # nothing that a model writes can become HTML
        "trusted-types 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _hashes_of(html: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    hashes = [b64encode(sha256(each.encode()).digest()).decode() for each in contents]
    return " ".join(f"'sha256-{each}'" for each in hashes)


async def _slot_action(
    service: Service, id_slot: str, action: str | None, body: SlotFile
) -> dict[str, object]:
    """The response to POST /slots/ID?action=ACTION. Raises ApiError."""
    engine, folder = service.engine, service.options.slot_folder
    if folder is None:
        raise ApiError(
            501,
            "this server does not save slots; start it with --slot-save-path FOLDER",
            code="not_supported",
        )
    ids = [str(i) for i in range(engine.n_slots)]
    if id_slot not in ids:
        raise ApiError(400, f"slot {id_slot[:20]!r} does not exist; ids are 0 to {ids[-1]}")
    slot = engine.pair.slots[int(id_slot)]
    started = perf_counter()
    if action == "erase":
        n_erased = await _between_rounds(service, slot, lambda: _erased(slot))
        return {"id_slot": int(id_slot), "n_erased": n_erased}
    if action not in ("save", "restore"):
        raise ApiError(400, "action must be save, restore or erase", param="action")
    path = folder / _checked(body.filename)
    try:
        done = await (_save if action == "save" else _restore)(service, slot, path)
    except SessionError as error:
        raise ApiError(400, str(error), code="invalid_session", param="filename") from error
    except CacheError as error:  # its message names the folder
        log_error("a slot could not be saved", error)
        message = "the file cannot be written: no room, or no permission; see --slot-save-path"
        raise ApiError(500, message, "server_error", code="failed") from error
    seconds = perf_counter() - started
    head = {"id_slot": int(id_slot), "filename": path.name}
    return {**head, **done, "timings": {f"{action}_ms": 1000 * seconds}}


async def _save(service: Service, slot: Slot, path: Path) -> dict[str, int]:
    text = await _between_rounds(service, slot, slot.saved)
    if text is None:
        raise SessionError("the slot is empty; save it after a request")
    keys = service.engine.pair.text_keys
    facts = await run_in_threadpool(session_file.write, path, text, keys)
    return {"n_saved": len(facts.tokens), "n_written": facts.n_bytes}


async def _restore(service: Service, slot: Slot, path: Path) -> dict[str, int]:
    pair, n_ctx = service.engine.pair, service.engine.n_ctx
    text, n_bytes = await run_in_threadpool(session_file.read, path, pair.text_keys, n_ctx)
    await _between_rounds(service, slot, lambda: _restored(pair.slots, slot, text, path))
    return {"n_restored": len(text.tokens), "n_read": n_bytes}


async def _between_rounds(service: Service, slot: Slot, work: Callable[[], T]) -> T:
    """Raises ApiError, and what `work` raises."""
    try:
        return await asyncio.wait_for(
            asyncio.wrap_future(service.texts.call(slot, work)), service.options.timeout
        )
    except asyncio.TimeoutError as error:
        raise ApiError(
            504,
            "the slot was in use for longer than --timeout; try again later",
            "timeout_error",
            code="timeout",
        ) from error


def _restored(slots: Slots, slot: Slot, text: CachedText, path: Path) -> None:
    slots.keep(slot, text.tokens)
    session_file.restore(text, slot, path)
    slot.n_prompt = len(text.tokens)


def _erased(slot: Slot) -> int:
    n = slot.target.n_held
    slot.forget()
    return n


def _checked(name: str | None) -> str:
    """The name, if it stays inside the folder. Raises ApiError if it does not."""
    if name is None:
        raise ApiError(400, "filename is missing: the file's name", param="filename")
    is_plain = name.isprintable() and name.strip(" .") and not set(name) & set('/\\:*?"<>|')
    if not is_plain or name[0] == "." or len(name.encode()) > _MOST_NAME:
        raise ApiError(
            400,
            "filename must be a plain name of at most 200 bytes, without folders and without a dot "
            "at its beginning",
            param="filename",
        )
    return name
