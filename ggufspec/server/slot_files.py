"""Saves, restores and erases the texts of slots for clients, as in llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from ggufspec.engine import session_file
from ggufspec.engine.prompt_cache import CachedText
from ggufspec.engine.slots import Slot, Slots
from ggufspec.errors import CacheError, SessionError
from ggufspec.server.errors import ApiError, log_error
from ggufspec.server.schema import SlotFile
from ggufspec.server.service import Service

T = TypeVar("T")
_MOST_NAME = 200  # bytes; leaves room for the suffix of whole_file


async def act(
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
    n_slots = engine.n_slots
    if not (id_slot.isascii() and id_slot.isdigit() and int(id_slot) < n_slots):
        raise ApiError(400, f"slot {id_slot[:20]!r} does not exist; ids are 0 to {n_slots - 1}")
    slot = engine.pair.slots[int(id_slot)]
    started = perf_counter()
    if action == "erase":
        n_erased = await _in_worker(service, slot, lambda: _erased(slot))
        return {"id_slot": int(id_slot), "n_erased": n_erased}
    if action not in ("save", "restore"):
        raise ApiError(400, "action must be save, restore or erase", param="action")
    path = folder / _checked(body.filename)
    try:
        facts = await (_save if action == "save" else _restore)(service, slot, path)
    except SessionError as error:
        raise ApiError(400, str(error), code="invalid_session", param="filename") from error
    except CacheError as error:  # its message names the folder
        log_error("a slot could not be saved", error)
        message = "the file cannot be written: no room, or no permission; see --slot-save-path"
        raise ApiError(500, message, "server_error", code="failed") from error
    of_tokens, of_bytes = {
        "save": ("n_saved", "n_written"),
        "restore": ("n_restored", "n_read"),
    }[action]
    return {
        "id_slot": int(id_slot),
        "filename": path.name,
        of_tokens: len(facts.tokens),
        of_bytes: facts.n_bytes,
        "timings": {f"{action}_ms": 1000 * (perf_counter() - started)},
    }


async def _save(service: Service, slot: Slot, path: Path) -> session_file.SessionFacts:
    text = await _in_worker(service, slot, slot.saved)
    if text is None:
        raise SessionError("the slot is empty; save it after a request")
    keys = service.engine.pair.text_keys
    return await run_in_threadpool(session_file.write, path, text, keys)


async def _restore(service: Service, slot: Slot, path: Path) -> session_file.SessionFacts:
    pair, n_ctx = service.engine.pair, service.engine.n_ctx
    text, n_bytes = await run_in_threadpool(session_file.read, path, pair.text_keys, n_ctx)
    await _in_worker(service, slot, lambda: _restored(pair.slots, slot, text, path))
    return session_file.SessionFacts(text.tokens, n_bytes)


async def _in_worker(service: Service, slot: Slot, work: Callable[[], T]) -> T:
    """Raises ApiError, and what `work` raises."""
    try:
        return await asyncio.wait_for(
            asyncio.wrap_future(service.worker.call(slot, work)), service.options.timeout
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
