"""Converts requests of other dialects to chats, which `parse_request` accepts."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError

from ggufspec.server.errors import ApiError
from ggufspec.server.schema import ChatRequest, GenerationBody


def as_chat(body: GenerationBody, **fields: Any) -> ChatRequest:
    """A chat with the shared fields of `body`, and with those of `fields` that are not None.

    Raises RequestValidationError, ApiError.
    """
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}; this API has one answer: leave it out", param="n")
    shared = {name: getattr(body, name) for name in body.model_fields_set}
    shared = {name: shared[name] for name in shared.keys() & GenerationBody.model_fields.keys()}
    given = {name: value for name, value in fields.items() if value is not None}
    for name in shared.keys() & given.keys():
        if shared[name] not in (None, given[name]):
            message = f"{name} is given twice, also by this API's own name for it; give one of them"
            raise ApiError(400, message, param=name)
    try:
        return ChatRequest(**shared | given)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from error


def of_type(what: str, *types: str | None, default: str | None = None) -> BeforeValidator:
    """Refuses objects of other types by name, before their fields are checked.

    An object without a type gets `default`.
    """

    def check(value: object) -> object:
        if not isinstance(value, dict):
            return value
        found = value.get("type", default)
        if found not in types:
            message = "{what} of type {found} are not supported; this server reads {types}"
            facts = {
                "what": what,
                "found": repr(found)[:100],
                "types": ", ".join(filter(None, types)),
            }
            raise PydanticCustomError("type_of_object", message, facts)
        return {**value, "type": found}

    return BeforeValidator(check)


def thinking_variables(wanted: bool | str | None) -> dict[str, bool]:
    """The variables that tell chat templates whether, or how, the model reasons first."""
    names = () if wanted is None else ("enable_thinking", "thinking")
    return dict.fromkeys(names, bool(wanted))
