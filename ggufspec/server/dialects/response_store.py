"""Keeps responses in memory, for later requests that continue them; the oldest are dropped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggufspec.server.dialects.renderer import Document
from ggufspec.server.dialects.responses_request import (
    ItemReference,
    ResponsesRequest,
    StoredItem,
    items_of,
)
from ggufspec.server.errors import ApiError

N_RESPONSES = 1000
N_BYTES = 64 * 2**20  # size of their JSON, including the conversations before them


@dataclass(frozen=True)
class _Stored:
    response: Document
    items: Sequence[StoredItem]  # the conversation up to the end of the response
    n_bytes: int


class ResponseStore:
    """The latest responses, by id."""

    def __init__(self, n_max: int = N_RESPONSES, n_bytes_max: int = N_BYTES) -> None:
        self._n_max, self._n_bytes_max = n_max, n_bytes_max
        self._found: dict[str, _Stored] = {}
        self._n_bytes = 0

    def items(self, body: ResponsesRequest) -> list[StoredItem]:
        """The conversation that a request continues: an earlier response's, and its own input.

        Raises ApiError.
        """
        before: Sequence[StoredItem] = ()
        if (id := body.previous_response_id) is not None:
            if id not in self._found:
                raise ApiError(
                    400,
                    f"there is no response {id[:100]!r}: it was never stored, or has been dropped; "
                    "send the whole conversation as 'input'",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = self._found[id].items
        own = [self._referred(i) if isinstance(i, ItemReference) else i for i in body.items]
        return [*before, *own]

    def add(self, response: Document, items: Sequence[StoredItem]) -> None:
        """Store a response to these items."""
        text = json.dumps([response, [item.model_dump() for item in items]])
        stored = _Stored(response, [*items, *items_of(response["output"])], len(text))
        self._found[response["id"]] = stored
        self._n_bytes += stored.n_bytes
        while len(self._found) > self._n_max or self._n_bytes > self._n_bytes_max:
            self.delete(next(iter(self._found)))

    def get(self, id: str) -> Document:
        """Raises ApiError for one that is not stored."""
        if id not in self._found:
            raise ApiError(404, f"there is no response {id[:100]!r}", param="response_id")
        return self._found[id].response

    def delete(self, id: str) -> dict[str, Any]:
        """Raises ApiError for one that is not stored."""
        self.get(id)
        self._n_bytes -= self._found.pop(id).n_bytes
        return {"id": id, "object": "response", "deleted": True}

    def _referred(self, reference: ItemReference) -> StoredItem:
        for stored in reversed(self._found.values()):
            for item in stored.response["output"]:
                if item["id"] == reference.id:
                    found: StoredItem = items_of([item])[0]
                    return found
        raise ApiError(
            400,
            f"input: item_reference names {reference.id[:100]!r}, which is no item of a stored "
            "response; send the item itself",
            param="input",
        )
