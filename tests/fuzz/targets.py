"""Each kind of input that comes from outside: what reads it, and which errors it may raise."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import h11
import tiny
from chat_formats import HARMONY, TEMPLATES, USER, parsed, tool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message

import ggufspec
from ggufspec.common.prompts import parse_prompts
from ggufspec.engine import session_file
from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.engine.options import file_sampling
from ggufspec.errors import GgufspecError, OptionError
from ggufspec.models.adapters import Adapter, with_adapters
from ggufspec.models.header import read_header
from ggufspec.models.heads import head_text, is_head
from ggufspec.models.key_overrides import key_overrides_of, with_key_overrides
from ggufspec.models.shape import shape_of
from ggufspec.placement.overrides import overrides_of, stays
from ggufspec.placement.rpc_address import addresses
from ggufspec.server.app import make_app
from ggufspec.server.dialects.messages import MessagesRequest
from ggufspec.server.dialects.ollama import OllamaRequest
from ggufspec.server.dialects.responses_request import ResponsesRequest
from ggufspec.server.errors import ApiError
from ggufspec.server.formats.chat_format import ChatFormat, format_of
from ggufspec.server.formats.deltas import MAX_NAME
from ggufspec.server.schema import ChatRequest, CompletionRequest, PredictRequest
from ggufspec.server.service import ServerOptions, make_service
from ggufspec.server.strict_json import parse_json, sent_arguments
from ggufspec.structured import grammar
from ggufspec.structured.gbnf import lark_of_gbnf
from ggufspec.structured.json_schema import lark_of_schema

MOST_SECONDS = 2.0  # for one input
_FORMATS = (*TEMPLATES.values(), HARMONY)
_TOOLS = [tool("weather", city={"type": "string"}, days={"type": "integer"}, more={})]
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Again."},
]
_TENSORS = [f"blk.{i}.ffn_{part}_exps.weight" for i in range(2) for part in ("up", "gate", "down")]
_KEYS = [{"name": "a", "is_head": False}, None, None]
_BODIES: tuple[type[BaseModel], ...] = (
    *(ChatRequest, CompletionRequest, PredictRequest),
    *(MessagesRequest, ResponsesRequest, OllamaRequest),
)
_START = struct.Struct("<8sIQ32s")  # of a session file


@cache
def _file(name: str) -> Path:
    folder = tempfile.mkdtemp(prefix="ggufspec-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / name


@cache
def _process() -> TemplateProcess:
    made = TemplateProcess(MOST_SECONDS / 4)
    atexit.register(made.close)
    return made


@cache
def _format(number: int) -> ChatFormat:
    template = ChatTemplate(_FORMATS[number], bos_text="", eos_text="", process=_process())
    return format_of(template)


def header(data: bytes) -> None:
    """A model file, or a draft or an adapter: all that is asked of its header."""
    path = _file("model.gguf")
    path.write_bytes(data)
    found = read_header(path)
    file_sampling(found.values)
    assert all(tensor.layer is None or tensor.layer >= 0 for tensor in found.tensors)
    parts: list[Callable[[], object]] = [
        *(lambda name=name: getattr(found, name) for name in ("vocabulary", "quantization")),
        lambda: (found.name, found.n_ctx, found.mtp_tensors, found.n_params, found.chat_template),
        lambda: shape_of(found),
        lambda: is_head(found) and head_text(found),
        lambda: with_adapters(found, (Adapter(path),)),
        lambda: with_key_overrides(found, key_overrides_of("", ["general.name=str:x"])),
    ]
    for part in parts:
        with suppress(GgufspecError):
            part()


def gbnf(data: bytes) -> None:
    lark_of_gbnf(data.decode("utf-8", "surrogateescape"))


def schema(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with suppress(OptionError):
        lark_of_schema(text, dropped=[])
    lark_of_schema(text)


def constraints(data: bytes) -> None:
    """The same as a caller gives them: compiled in a process with limits."""
    text = data[1:].decode("utf-8", "surrogateescape")
    kinds = (grammar.of_grammar, grammar.of_json_schema, grammar.of_regex)
    kinds[data[0] % len(kinds)](text)


def calls(data: bytes) -> None:
    """An answer with tool calls: the pieces in which it comes make no difference."""
    text = data[2:].decode("utf-8", "replace")
    found = _format(data[0] % len(_FORMATS))
    whole = parsed(found.parser("", _TOOLS), text, len(text) or 1)
    in_pieces = parsed(found.parser("", _TOOLS), text, data[1] % 16 + 1)
    if len(text) < MAX_NAME:  # longer ones may be no call, which depends on the pieces
        assert whole[:3] == in_pieces[:3]
    repr(whole).encode()
    for _, arguments in whole.calls:
        arguments.encode()
    for name, _ in whole.calls:
        assert name is None or name.encode()
    sent_arguments(text).encode()


def template(data: bytes) -> None:
    """A chat template: a conversation, and the format of its answers."""
    source = data.decode("utf-8", "replace")
    made = ChatTemplate(source, bos_text="<s>", eos_text="</s>", process=_process())
    with suppress(GgufspecError):
        made.render(_MESSAGES)
    found = format_of(made)
    parsed(found.parser("", _TOOLS), f"{found.text} x {{}}", 3)


def prompts(data: bytes) -> None:
    parse_prompts(data[1:], "a.jsonl" if data[0] % 2 else "a.txt")


def session(data: bytes) -> None:
    """A session file. Its hashes are mended, which a stranger can do, too."""
    n_header = min(int.from_bytes(data[:2], "little"), len(data))
    head, rest = data[2 : 2 + n_header], data[2 + n_header :]
    head = head.replace(b"HASH", hashlib.sha256(rest).hexdigest().encode())
    start = _START.pack(b"GGUFSPEC", 1, len(head), hashlib.sha256(head).digest())
    path = _file("session")
    path.write_bytes(start + head + rest)
    session_file.read(path, _KEYS, 64)


def raw_session(data: bytes) -> None:
    path = _file("session")
    path.write_bytes(data)
    session_file.read(path, _KEYS, 64)


def body(data: bytes) -> None:
    """The body of a request to the server; those of other APIs become chats."""
    found = _BODIES[data[0] % len(_BODIES)].model_validate(parse_json(data[1:]))
    if isinstance(found, (MessagesRequest, OllamaRequest)):
        found.chat()
    elif isinstance(found, ResponsesRequest):
        found.chat(found.items)


@cache
def _app() -> tuple[ASGIApp, asyncio.AbstractEventLoop]:
    path = tiny.write_llama(_file("served.gguf"), vocab=tiny.BPE, chat_template=tiny.CHATML)
    engine = ggufspec.load(path, n_threads=1, n_ctx=128, tuned=False)
    folder = path.parent / "slots"
    folder.mkdir()
    options = ServerOptions("tiny", max_tokens=2, timeout=MOST_SECONDS, slot_folder=folder)
    return make_app(make_service(engine, options)), asyncio.new_event_loop()


def request(data: bytes) -> None:
    """A whole request to the server, with its method, path and headers; the body ends the data."""
    head, _, body = data.partition(b"\r\n\r\n")
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head + b"\r\n\r\n")
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return
    if not isinstance(event, h11.Request):
        return
    path, _, query = event.target.partition(b"?")
    scope = {
        **{"type": "http", "http_version": "1.1", "scheme": "http", "root_path": ""},
        **{"method": event.method.decode("ascii"), "path": unquote(path.decode("ascii"))},
        **{"raw_path": path, "query_string": query, "server": ("127.0.0.1", 8080)},
        **{"headers": [*event.headers], "state": {}},
    }
    sent: list[Message] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not received:
            await asyncio.Event().wait()
        return received.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    app, loop = _app()
    loop.run_until_complete(app(scope, receive, send))
    assert sent[0]["status"] != 500


def options(data: bytes) -> None:
    """Options with a syntax of their own."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(OptionError):
        for name in _TENSORS:
            stays(overrides_of("", [text], None, None) or (), name)
    with suppress(OptionError):
        key_overrides_of("override_kv", [text])
    addresses("rpc", [text])


Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        *(header, gbnf, schema, constraints, calls, template, prompts),
        *(session, raw_session, body, request, options),
    )
}
EXPECTED = (GgufspecError, ApiError, ValidationError, RequestValidationError)


def try_input(target: Target, data: bytes) -> None:
    """Raises what no caller expects, and AssertionError for an input that takes too long."""
    if len(data) < 2:  # that choose what is tried
        return
    began = time.process_time()
    with suppress(*EXPECTED):
        target(data)
    seconds = time.process_time() - began
    assert seconds < MOST_SECONDS, f"it took {seconds:.1f} s"
