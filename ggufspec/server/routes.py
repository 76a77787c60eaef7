"""The routes that generate no text: tokens, slots, the model and the state of the server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ggufspec.llama.vocab import Vocab
from ggufspec.server import adapters, descriptions, schema
from ggufspec.server.errors import ApiError
from ggufspec.server.page import page
from ggufspec.server.service import Service
from ggufspec.server.slot_files import SlotFiles


def add_tokenization(router: APIRouter, service: Service) -> None:
    """Add the routes that convert texts to token ids, and back."""
    vocab = service.engine.vocab

    @router.post("/tokenize")
    async def tokenize(body: schema.TokenizeRequest) -> Response:
        """Convert a text to token ids."""
        tokens = await run_in_threadpool(
            vocab.tokenize,
            body.content,
            add_special=body.add_special,
            parse_special=body.parse_special,
        )
        found = [_with_piece(vocab, each) for each in tokens] if body.with_pieces else tokens
        return JSONResponse({"tokens": found})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Name the first and the last token, and the chat template, as vLLM's server does."""
        return JSONResponse(descriptions.tokenizer(service.engine))

    @router.post("/detokenize")
    async def detokenize(body: schema.DetokenizeRequest) -> Response:
        """Convert token ids to a text; control tokens are left out."""
        for token in body.tokens:
            if token >= vocab.n_tokens:
                raise ApiError(
                    400,
                    f"token {token} does not exist; ids are 0 to {vocab.n_tokens - 1:,}",
                    param="tokens",
                )
        data = await run_in_threadpool(lambda: b"".join(map(vocab.piece, body.tokens)))
        text = data.decode("utf-8", "replace")
        return JSONResponse({"content": text, "prompt": text})  # names of llama.cpp and vLLM


def add_slots(router: APIRouter, service: Service) -> None:
    """Add the route for files of slots."""
    options = service.options
    files = SlotFiles(service.engine, service.worker, options.slot_folder, options.timeout)

    @router.post("/slots/{id_slot}")
    async def slots(
        id_slot: str, action: str | None = None, body: schema.SlotFile | None = None
    ) -> Response:
        """Save the text of a slot to a file, restore or erase it, as llama.cpp's server does."""
        found = await files.act(id_slot, action, body or schema.SlotFile.model_construct())
        return JSONResponse(found)


def add_information(router: APIRouter, service: Service) -> None:
    """Add the routes that describe the model and the server, and the page."""
    model = descriptions.model(service.engine, service.options, service.started_at)

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
        status = service.worker.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @router.get("/props")
    async def properties() -> Response:
        """Describe model, slots and default options, as llama.cpp's server does."""
        return JSONResponse(descriptions.properties(service.engine, service.options))

    @router.get("/lora-adapters")
    async def lora_adapters() -> Response:
        """List the LoRA adapters and their scales, as llama.cpp's server does."""
        return JSONResponse(adapters.described(service.engine))

    @router.post("/lora-adapters")
    async def set_lora_adapters(body: list[schema.AdapterScale]) -> Response:
        """Accept the scales that the server was started with; others are refused."""
        adapters.check_scales(body, service.engine)
        return JSONResponse({"success": True})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Report metrics for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(service.metrics.registry), headers={"content-type": content_type})

    @router.get("/", include_in_schema=False)
    async def built_in_page() -> Response:
        return page()


def _with_piece(vocab: Vocab, token: int) -> dict[str, object]:
    """A token with its text, or with its bytes if they are not UTF-8, as in llama.cpp."""
    data = vocab.piece(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
