"""Files that are no images, are damaged or would fill the memory are refused by name."""

from __future__ import annotations

import random
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tiny
import tiny_projectors
from tiny_projectors import png

from ggufspec.common.image_files import MOST_BYTES
from ggufspec.errors import PromptError
from ggufspec.llama.model import Model
from ggufspec.llama.projector import Projector

GOOD = png(24, 16)
SIGNATURE = GOOD[:8]
DAMAGED, NONE, LARGE = "an image is damaged", "should be an image begins with", "make it smaller"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int, data: bytes = b"", *, depth: int = 8, color: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_of(width: int, height: int, marker: int = 0xC0) -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8\xff\xe0\x00\x04ab\xff" + bytes([marker]) + struct.pack(">H", 11) + frame


def gif_of(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"


def bmp_of(width: int, height: int, size: int = 40) -> bytes:
    numbers = "<HH" if size == 12 else "<ii"
    return b"BM" + bytes(12) + struct.pack("<I", size) + struct.pack(numbers, width, height)


HOSTILE = {
    "empty": (b"", NONE),
    "a byte": (b"\x89", NONE),
    "zeros": (bytes(1000), NONE),
    "text": (b"hello world", NONE),
    "html": (b"<html><script>alert(1)</script></html>", NONE),
    "svg": (
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        NONE,
    ),
    "svg with entities": (b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><svg/>', NONE),
    "pdf": (b"%PDF-1.7\n", NONE),
    "zip": (b"PK\x03\x04" + bytes(100), NONE),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), NONE),
    "elf": (b"\x7fELF" + bytes(100), NONE),
    "gguf": (b"GGUF" + bytes(100), NONE),
    "tiff": (b"II*\x00" + bytes(100), NONE),
    "webp": (b"RIFF\x24\x00\x00\x00WEBPVP8 " + bytes(30), NONE),
    "wav": (b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(30), NONE),
    "mp3": (b"ID3\x04" + bytes(300), NONE),
    "mp3 frame": (b"\xff\xfb\x90\x00" + bytes(300), NONE),
    "mp4": (b"\x00\x00\x00\x18ftypmp42" + bytes(30), NONE),
    "psd": (b"8BPS\x00\x01" + bytes(100), NONE),
    "hdr": (b"#?RADIANCE\n", NONE),
    "ppm": (b"P6\n99999 99999\n255\n", NONE),
    "png signature": (SIGNATURE, DAMAGED),
    "png header cut": (GOOD[:20], DAMAGED),
    "png without data": (GOOD[:40], DAMAGED),
    "png half": (GOOD[: len(GOOD) // 2], DAMAGED),
    "png of no width": (png_of(0, 10), DAMAGED),
    "png of no height": (png_of(10, 0), DAMAGED),
    "png bomb": (png_of(100_000, 100_000, zlib.compress(bytes(1000))), LARGE),
    "png of 2**31": (png_of(2**31 - 1, 2**31 - 1), LARGE),
    "png with wrong zlib": (png_of(16, 16, b"\xff" * 50), DAMAGED),
    "png with too little": (png_of(1000, 1000, zlib.compress(b"\0\0\0")), DAMAGED),
    "png with a wrong filter": (png_of(1, 1, zlib.compress(b"\x09\0\0\0")), DAMAGED),
    "png of a wrong depth": (png_of(4, 4, zlib.compress(bytes(100)), depth=77), DAMAGED),
    "png of a wrong color": (png_of(4, 4, zlib.compress(bytes(100)), color=9), DAMAGED),
    "png palette without palette": (png_of(4, 4, zlib.compress(bytes(100)), color=3), DAMAGED),
    "jpeg signature": (b"\xff\xd8\xff", DAMAGED),
    "jpeg without frame": (b"\xff\xd8\xff\xe0\x00\x04ab\xff\xd9", DAMAGED),
    "jpeg bomb": (jpeg_of(65_535, 65_535), LARGE),
    "progressive jpeg bomb": (jpeg_of(65_535, 65_535, 0xC2), LARGE),
    "jpeg frame cut": (jpeg_of(16, 16)[:14], DAMAGED),
    "jpeg of no size": (jpeg_of(0, 0), DAMAGED),
    "gif header cut": (b"GIF89a\x01", DAMAGED),
    "gif bomb": (gif_of(65_535, 65_535), LARGE),
    "gif without frames": (gif_of(10, 10), DAMAGED),
    "bmp cut": (b"BM\0\0", DAMAGED),
    "bmp bomb": (bmp_of(30_000, -30_000), LARGE),
    "bmp of 2**31": (bmp_of(-(2**31), -(2**31)), LARGE),
    "old bmp bomb": (bmp_of(65_535, 65_535, 12), LARGE),
    "bmp without data": (bmp_of(8, 8), DAMAGED),
    "too many bytes": (GOOD + bytes(MOST_BYTES), LARGE),
}


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Projector]:
    folder = tmp_path_factory.mktemp("models")
    file = tiny_projectors.write_llava(folder / "mmproj.gguf")
    with (
        closing(Model(tiny.write_llama(folder / "model.gguf"))) as model,
        closing(Projector(file, model, n_threads=1)) as made,
    ):
        yield made


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(projector: Projector, name: str) -> None:
    data, why = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PromptError, match=why):
        projector.read(data)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150_000, "KiB"  # an image of 40 million pixels takes 120 MB
    assert projector.n_encoded == 0


def test_no_program_on_the_path_is_started_for_a_damaged_image(
    projector: Projector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ffprobe", "ffmpeg"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho > '{tmp_path}/started'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(PromptError, match=DAMAGED):
        projector.read(GOOD[:40])
    assert not (tmp_path / "started").exists()


def test_changed_bytes_of_a_file_end_nothing(projector: Projector) -> None:
    pick = random.Random(0)
    n_read = 0
    for _ in range(200):
        data = bytearray(png(9, 7, 1))
        for _ in range(pick.randint(1, 4)):
            data[pick.randrange(8, len(data))] = pick.randrange(256)
        try:
            projector.read(bytes(data[: pick.randint(30, len(data))]))
            n_read += 1
        except PromptError:
            pass
    assert projector.read(GOOD)
