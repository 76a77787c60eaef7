"""Changes inputs at random, as fuzzers do: the same ones for the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
_TEXTS = [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"1e999", b"-1", b"9" * 5000, b"NaN"]
_REPEATED = b"[]{}()<>\"'\\ \n*+?|-,:=.%ax0"


def mutated(seeds: Sequence[bytes], random: Random) -> bytes:
    """One of the seeds with one to four changes."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.randint(1, 4)):
        random.choice(_CHANGES)(data, seeds, random)
    return bytes(data)


def _flip(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _number(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    at, size = random.randint(0, len(data)), random.choice([1, 2, 4, 8])
    data[at : at + size] = (random.choice(_NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")


def _text(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.choice(_TEXTS)


def _repeat(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    at, n = random.randint(0, len(data)), random.choice([2, 20, 300, 5000])
    length = random.randint(1, 12)
    part = bytes([random.choice(_REPEATED)]) if random.random() < 0.5 else data[at : at + length]
    data[at:at] = part * n


def _cut(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    at = random.randint(0, len(data))
    del data[at : at + random.choice([1, 4, 30, len(data)])]


def _move(data: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    other = random.choice(seeds)
    start, at = random.randint(0, len(other)), random.randint(0, len(data))
    data[at:at] = other[start : start + random.randint(1, 60)]


_CHANGES: list[Callable[[bytearray, Sequence[bytes], Random], None]] = [
    *(_flip, _number, _text, _repeat, _cut, _move),
]
