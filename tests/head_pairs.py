"""Tiny targets with heads of all kinds, for tests of what holds for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import gguf
import numpy as np
import tiny
import tiny_blocks
import tiny_heads
from tiny_blocks import BlockHead
from tiny_heads import Head, Table

import ggufspec
from ggufspec.llama.context import Context, HeadLink
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.head import Head as HeadOf
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.models.header import read_header
from ggufspec.models.heads import head_of

TABLE = Table(n_classes=4)
F16, F32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
PACKAGE = str(Path(ggufspec.__file__).parent)
SOFTER = 0.02  # planted attention sees a single cell; with this share of its scores, all of them
BLOCK_TABLE = Table(vocab=tiny_blocks.with_mask(tiny.SPM), n_classes=4)
MARKED = replace(TABLE, n_markers=6)  # a recurrent state of any length


class Pair(NamedTuple):
    """Files for `ggufspec.load`, and what they compute."""

    target: Path
    draft: Path | str
    table: Table
    head: Head | BlockHead

    @property
    def n_at_once(self) -> int | None:
        """The most tokens that it drafts behind a text; None: any number."""
        return self.head.n_max if isinstance(self.head, BlockHead) else None

    def logits(self, tokens: Sequence[int]) -> tiny.F32:
        """What the head computes after `tokens`, behind the target's states of the earlier ones."""
        if isinstance(self.head, BlockHead):
            return self.head.row(tokens, ())
        return self.head.logits(tokens)


def glm4moe(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    head = Head(table=table, **how)
    return Pair(tiny_heads.write_glm4moe(folder / "glm.gguf", table, head), "mtp", table, head)


def qwen35(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    head = Head(table=table, **how)
    return Pair(tiny_heads.write_qwen35(folder / "qwen.gguf", table, head), "mtp", table, head)


def step35(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    head = Head(table=table, **how)
    path = tiny_heads.write_step35(folder / "step.gguf", table, [head] * 3)
    return Pair(path, "mtp", table, head)


def sidecar(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    head = Head(table=table, **how)
    target = tiny_heads.write_glm4moe(folder / "trunk.gguf", table, head, part="trunk")
    draft = tiny_heads.write_glm4moe(folder / "mtp-trunk.gguf", table, head, part="head")
    return Pair(target, draft, table, head)


def eagle3(folder: Path, table: Table = TABLE, own: bool = False, **how: Any) -> Pair:
    head = Head(table=table, **how)
    target = tiny_heads.write_llama_table(folder / "llama.gguf", table)
    draft = tiny_heads.write_eagle3(
        folder / "eagle3.gguf", head, own_embeddings=own, own_output=own
    )
    return Pair(target, draft, table, head)


def eagle3_own(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    return eagle3(folder, table, own=True, **how)


def eagle3_d2t(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    return eagle3(folder, table, n_kept=len(table.spoken) * 3 // 4, **how)


def gemma4(folder: Path, table: Table = TABLE, **how: Any) -> Pair:
    head = Head(table=table, **how)
    target = tiny_heads.write_gemma4(folder / "gemma.gguf", table)
    draft = tiny_heads.write_gemma4_assistant(folder / "mtp-gemma.gguf", head)
    return Pair(target, draft, table, head)


def dflash(folder: Path, table: Table = BLOCK_TABLE, own: bool = False, **how: Any) -> Pair:
    head = BlockHead(table=table, **how)
    target = tiny_heads.write_llama_table(folder / "blocks.gguf", table)
    draft = tiny_blocks.write_dflash(
        folder / f"{head.kind}.gguf", head, own_embeddings=own, own_output=own
    )
    return Pair(target, draft, table, head)


def dflash_own(folder: Path, table: Table = BLOCK_TABLE, **how: Any) -> Pair:
    return dflash(folder, table, own=True, **how)


def dflash_d2t(folder: Path, table: Table = BLOCK_TABLE, **how: Any) -> Pair:
    return dflash(folder, table, n_kept=len(table.spoken) * 3 // 4, **how)


def dspark(folder: Path, table: Table = BLOCK_TABLE, **how: Any) -> Pair:
    return dflash(folder, table, kind="dspark", **how)


def dflash2(folder: Path, table: Table = BLOCK_TABLE, **how: Any) -> Pair:
    return dflash(folder, table, kind="dflash2", **how)


Writer = Callable[..., Pair]
BLOCK_WRITERS: dict[str, Writer] = {
    writer.__name__: writer for writer in (dflash, dflash_own, dflash_d2t, dspark, dflash2)
}
WRITERS: dict[str, Writer] = {
    writer.__name__: writer
    for writer in (glm4moe, qwen35, step35, sidecar, eagle3, eagle3_own, eagle3_d2t, gemma4)
} | BLOCK_WRITERS


def perturbed(pair: Pair, deviation: float = 0.03) -> Pair:
    """Makes all logits depend on all that is read, in place; what was planted no longer holds."""
    random = np.random.default_rng(1)
    for path in sorted({str(pair.target), str(pair.draft)} - {"mtp"}):
        reader = gguf.GGUFReader(path, "r+")
        for tensor in reader.tensors:
            if "attn_q" in tensor.name or "attn_sinks" in tensor.name:
                tensor.data[...] *= SOFTER
            elif tensor.tensor_type == F16 and "ffn_gate" in tensor.name:
                tensor.data[...] *= SOFTER  # states of blocks would be too large for halves
            elif tensor.tensor_type == F32 and (
                "norm" not in tensor.name or "post_" in tensor.name
            ):
                noise = random.normal(0, deviation, tensor.data.shape)
                tensor.data[...] += noise.astype(np.float32)
        reader.data.flush()
    return pair


class Contexts:
    """A target and its head, without an engine."""

    def __init__(self, pair: Pair, **options: Any) -> None:
        header = read_header(pair.target)
        draft = None if pair.draft == "mtp" else read_header(Path(pair.draft))
        facts = head_of(header, draft)
        assert facts is not None
        is_mtp = facts.kind == "mtp"
        self.models = [Model(pair.target, mtp=draft is None)]
        if draft is not None:
            self.models.append(Model(Path(pair.draft), mtp=is_mtp, is_head=True))
        exact = {"flash_attention": "off", "type_k": "f32", "type_v": "f32", "n_threads": 1}
        target_options = ContextOptions(**{**exact, **options})
        n_rows = facts.n_rows(target_options.n_rows - 1)
        head_options = replace(target_options, n_rows=n_rows, n_rollback=0)
        self.target = Context(self.models[0], target_options)
        link = HeadLink(self.target, facts)
        self.context = Context(self.models[-1], head_options, link=link)
        self.head = HeadOf(link, self.context, n_unread_max=64)
        self.sessions = [LlamaSession(self.target, i) for i in range(target_options.n_sequences)]

    def close(self) -> None:
        for each in (self.context, self.target, *reversed(self.models)):
            each.close()


class Interrupted:
    """Raises KeyboardInterrupt where Python would, at the nth such moment in our code.

    That is where a function of ours begins, and where one that is written in C returns to us.
    `within`: only in this function and those that it calls.
    """

    def __init__(self, at: int, within: Callable[..., object] | None = None) -> None:
        self.n_left = at
        self.where = ""  # the moment of the interrupt
        self._within = within

    @property
    def is_late(self) -> bool:
        """Whether there were fewer moments."""
        return self.n_left > 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and self._counts(frame):
            self.n_left -= 1
            if self.n_left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, {event}"
                raise KeyboardInterrupt

    def _counts(self, frame: FrameType) -> bool:
        if self._within is None:
            return frame.f_code.co_filename.startswith(PACKAGE)
        inside: FrameType | None = frame
        while inside is not None and inside.f_code is not self._within.__code__:
            if inside.f_code.co_name == "_receive":  # called by llama.cpp, which it does not end
                return False
            inside = inside.f_back
        return inside is not None
