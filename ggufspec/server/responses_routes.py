"""The routes of OpenAI's responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ggufspec.server.answering import answer
from ggufspec.server.dialects.renderer import Document
from ggufspec.server.dialects.response_store import ResponseStore
from ggufspec.server.dialects.responses_request import ResponsesRequest
from ggufspec.server.dialects.responses_response import ResponsesRenderer
from ggufspec.server.service import Service


def add_responses(router: APIRouter, service: Service) -> None:
    """Add the routes that create responses, and read and delete stored ones."""
    store = ResponseStore()

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation, as OpenAI's responses API does."""
        items = store.items(body)

        def keep(response: Document) -> None:
            store.add(response, items)

        return await answer(
            body.chat(items),
            request,
            service,
            lambda parsed: ResponsesRenderer(body, parsed, service.options.alias, keep),
        )

    @router.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str) -> Response:
        """Return a stored response."""
        return JSONResponse(store.get(response_id))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Delete a stored response; responses that continue it remain."""
        return JSONResponse(store.delete(response_id))
