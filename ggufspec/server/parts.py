"""The base of all request bodies, and the parts of a message: texts and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ggufspec.server import fields

_N_PARTS = 5000  # a thousand take some milliseconds of processor time


class Body(BaseModel):
    """An object that refuses unknown fields, except fields without effect (see fields.toml)."""

    model_config = ConfigDict(strict=True, extra="forbid")
    kinds: ClassVar[tuple[str, ...]] = ()  # keys in fields.toml

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: object) -> object:
        return fields.given(data, cls.kinds, cls.model_fields) if isinstance(data, dict) else data


def of_type(what: str, *types: str | None, default: str | None = None) -> BeforeValidator:
    """Refuses objects of other types by name, before their fields; without a type: `default`."""

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


class TextPart(Body):
    """A text of a message."""

    kinds = ("messages",)
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Where the file of an image is."""

    kinds = ("images",)
    url: str = Field(
        description="data:image/png;base64,...; or an address, with --allow-remote-images."
    )


class ImagePart(Body):
    """An image of a message: a PNG, JPEG, GIF or BMP file."""

    kinds = ("messages", "images")
    type: Literal["image_url"]
    image_url: ImageUrl | str


TextParts = Annotated[list[TextPart], Field(max_length=_N_PARTS)]
Parts = Annotated[
    list[
        Annotated[
            Annotated[TextPart | ImagePart, Field(discriminator="type")],
            of_type("parts", "text", "image_url"),
        ]
    ],
    Field(max_length=_N_PARTS),
]


def joined(content: str | Sequence[Any] | None, separator: str = "\n") -> str:
    """The text of a message's content, those of its parts joined that have one."""
    if isinstance(content, str) or content is None:
        return content or ""
    return separator.join(part.text for part in content if hasattr(part, "text"))


def content_of(parts: str | Sequence[Any]) -> str | list[dict[str, Any]]:
    """The texts of a dialect's parts as one; with images, all texts and images."""
    if isinstance(parts, str) or not any(hasattr(part, "image") for part in parts):
        return joined(parts)
    found: list[dict[str, Any]] = []
    for part in parts:
        if hasattr(part, "image"):
            found.append(part.image)
        elif hasattr(part, "text"):
            found.append({"type": "text", "text": part.text})
    return found


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def encoded_image(data: str, media_type: str = "") -> dict[str, Any]:
    """The part of an image whose file came in base64."""
    return image_part(f"data:{media_type};base64,{data}")
