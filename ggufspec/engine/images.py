"""Takes the images out of messages, and puts their tokens into the prompt."""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ggufspec.common.image_files import MOST_BYTES, check_image, check_number
from ggufspec.common.reading import read_file
from ggufspec.engine.template_probe import Message
from ggufspec.errors import PromptError
from ggufspec.llama.context import Context
from ggufspec.llama.projector import Projector

NO_PROJECTOR = (
    "this model reads no images: no projector was loaded; name its file (mmproj, -mm), or leave "
    "the images out"
)
_KINDS = ("image", "image_url")


class Images:
    """The images of a conversation, by marks in the texts of its messages.

    The marks are random, so that no text of a message has them.
    """

    def __init__(self, messages: Sequence[Message], target: Context) -> None:
        """Raises PromptError for a file that is no image, and if the target reads none."""
        self._mark = f"<__image_{secrets.token_hex(8)}"
        self._any_mark = re.compile(f"{self._mark}_([0-9]+)__>")
        self._files: list[bytes] = []
        self.messages: Sequence[Message] = messages
        self._target = target
        given = messages if isinstance(messages, Sequence) else ()  # others are refused later
        n_images = sum(is_image(part) for each in given for part in _parts(each))
        check_number(n_images)
        if n_images:
            _projector_of(target)
            self.messages = [self._marked(message) for message in messages]

    def __len__(self) -> int:
        return len(self._files)

    def tokens(self, text: str, *, has_bos: bool) -> list[int]:
        """The tokens of a rendered conversation. Raises PromptError."""
        parts = self._any_mark.split(text)
        if sorted(map(int, parts[1::2])) != [*range(len(self._files))]:
            raise PromptError(
                "the chat template does not write each image once; leave out images in these "
                "messages, or use another template (--chat-template-file)"
            )
        files = [self._files[int(part)] for part in parts[1::2]]
        return tokens_of(parts[::2], files, self._target, add_special=not has_bos)

    def with_marks(self, text: str, mark: str) -> str:
        """A rendered conversation with `mark` at the place of each image."""
        return self._any_mark.sub(mark, text)

    def _marked(self, message: Message) -> Message:
        parts = _parts(message)
        if not any(map(is_image, parts)):
            return message
        text, is_after_image = "", True
        for part in message["content"]:
            if not isinstance(part, Mapping):
                raise PromptError(f"a part of a message is no object: {part!r:.80}")
            if is_image(part):
                self._files.append(data := bytes_of(part))
                check_image(data)
                text += f"{self._mark}_{len(self._files) - 1}__>"
            elif isinstance(said := part.get("text"), str):
                text += said if is_after_image else f"\n{said}"
            else:
                raise PromptError(f"a part of a message has neither text nor image: {part!r:.80}")
            is_after_image = is_image(part)
        return {**message, "content": text}


def tokens_of(
    texts: Sequence[str], files: Sequence[bytes], target: Context, *, add_special: bool
) -> list[int]:
    """The tokens of texts with an image file between each two. Raises PromptError."""
    vocab, found = target.model.vocab, list[int]()
    for i, text in enumerate(texts):
        if i:
            found += _projector_of(target).read(files[i - 1])
        if text or not i:
            found += vocab.tokenize(text, add_special=add_special and not i, parse_special=True)
    if found and found[-1] < 0:
        raise PromptError("the prompt ends with an image; put a text behind it")
    return found


def _projector_of(target: Context) -> Projector:
    if target.projector is None:
        raise PromptError(NO_PROJECTOR)
    return target.projector


def with_images(message: Message, paths: Sequence[Path]) -> Message:
    """A message whose text is about the images in these files, which stand before it."""
    if not paths:
        return message
    images = [{"type": "image", "path": str(path)} for path in paths]
    return {**message, "content": [*images, {"type": "text", "text": message["content"]}]}


def checked(messages: Sequence[Message]) -> list[Message]:
    """Read and check the images of messages. In the messages that are returned, each path of an
    image is absolute, with the hash of the file beside it. Raises PromptError.
    """
    check_number(sum(is_image(part) for each in messages for part in _parts(each)))
    return [
        {**each, "content": [_checked(part) for part in parts]} if parts else each
        for each in messages
        for parts in [_parts(each)]
    ]


def _checked(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_image(part):
        return part
    check_image(data := bytes_of(part))
    if (path := part.get("path")) is None:
        return part
    return {**part, "path": os.path.abspath(path), "sha256": sha256(data).hexdigest()}


def is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in _KINDS


def bytes_of(part: Mapping[str, Any]) -> bytes:
    """The file of an image in a message.

    Of {"type": "image", "path": ...} or "data": bytes, and OpenAI's {"type": "image_url",
    "image_url": {"url": "data:..."}}. Raises PromptError.
    """
    if (path := part.get("path")) is not None:
        if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
            raise PromptError(f"the path of an image is {path!r:.80}; give the name of a file")
        return read_file(Path(path), "the image", PromptError)
    if isinstance(data := part.get("data"), bytes):
        return data
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str):
        raise PromptError(
            'an image needs a file: {"type": "image", "path": ...}, or {"type": "image_url", '
            '"image_url": {"url": "data:image/png;base64,..."}}'
        )
    kind, comma, encoded = url.partition(",")
    if not (kind.startswith("data:") and kind.endswith(";base64") and comma):
        raise PromptError(
            f"the URL of an image begins with {url[:20]!r}; send the image itself, as "
            "data:image/png;base64,..."
        )
    return decoded(encoded)


def decoded(encoded: str) -> bytes:
    """The file of an image in base64. Raises PromptError."""
    if len(encoded) > MOST_BYTES * 4 // 3 + 4:
        raise PromptError(f"an image has more than {MOST_BYTES // 2**20} MiB; make it smaller")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"an image is not valid base64: {error}") from error


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, Mapping)]
