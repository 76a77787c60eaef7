"""Reads the format and the size of an image file from its header, before it is decoded."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ggufspec.common.files import format_bytes
from ggufspec.errors import PromptError

N_IMAGES_MAX = 32  # in a text
MOST_BYTES = 32 * 2**20  # of a file
_MOST_PIXELS = 40_000_000  # 120 MB once decoded
_FORMATS = "JPEG, PNG, GIF and BMP"
# The markers of JPEG before a frame's size: all of baseline, extended and progressive frames.
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def check_image(data: bytes) -> None:
    """Raise PromptError for a file that is no image, is damaged, or is too large to decode."""
    if len(data) > MOST_BYTES:
        raise PromptError(
            f"an image has {format_bytes(len(data))}, more than {format_bytes(MOST_BYTES)}; make "
            "it smaller"
        )
    try:
        size = _size(data)
    except (struct.error, IndexError) as error:
        raise PromptError("an image is damaged: it ends within its header") from error
    if size is None:
        begins = data[:8].hex(" ") or "nothing"
        raise PromptError(
            f"a file that should be an image begins with {begins}; send {_FORMATS} files"
        )
    width, height = size
    if not (width and height):
        raise PromptError(f"an image is damaged: it has {width} x {height} pixels")
    if width * height > _MOST_PIXELS:
        raise PromptError(
            f"an image has {width:,} x {height:,} pixels, more than {_MOST_PIXELS:,}; make it "
            "smaller"
        )


def check_number(n_images: int) -> None:
    """Raise PromptError for too many images in a text."""
    if n_images > N_IMAGES_MAX:
        raise PromptError(
            f"the messages have {n_images} images, more than {N_IMAGES_MAX}; leave out older ones"
        )


def _size(data: bytes) -> tuple[int, int] | None:
    """Width and height; None: the file has another format."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", data, 16)
        return width, height
    if data.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", data, 6)  # of the canvas, which has all frames
        return width, height
    if data.startswith(b"BM"):
        if struct.unpack_from("<I", data, 14)[0] == 12:
            width, height = struct.unpack_from("<HH", data, 18)
            return width, height
        width, height = struct.unpack_from("<ii", data, 18)
        return abs(width), abs(height)
    if data.startswith(b"\xff\xd8\xff"):
        return next(_frames(data), (0, 0))
    return None


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    """The sizes of the frames of a JPEG file: its first one decides."""
    at = 2
    while at < len(data):
        if data[at] != 0xFF:
            at += 1
            continue
        marker = data[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            yield width, height
        if marker in (0xFF, 0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            at += 1 if marker == 0xFF else 2
            continue
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
