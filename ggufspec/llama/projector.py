"""Turns images into cells of a text and into their embeddings, with llama.cpp's libmtmd."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from operator import le
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.common import defaults
from ggufspec.common.failures import log_failure
from ggufspec.common.files import fingerprint_of
from ggufspec.common.image_files import check_image
from ggufspec.common.progress import NamedProgress
from ggufspec.decoding.types import token_array
from ggufspec.errors import ClosedError, DecodeError, ModelError, PromptError
from ggufspec.llama.eval_callback import EvalCallback
from ggufspec.llama.image_cells import cells_of, images_in
from ggufspec.llama.log import listening, log
from ggufspec.llama.row_breaks import RowBreaks
from ggufspec.llama.threadpool import end_threads
from ggufspec.llama.vocab import meta_text
from ggufspec.models.projectors import check_projector, kind_of

if TYPE_CHECKING:
    from ggufspec.llama.model import Model

_MOST_BYTES = 512 * 2**20  # of embeddings that are kept for later turns
_SECONDS_KEPT = 60.0  # at least, between the reading of an image and the begin of its text
_NEED_MROPE = ("glm4", "glm4moe")
# Minimum number of cells of an image of these kinds. They take up to 1,120, which see each other,
# so that all have to fit into one batch.
_SCALED = {"gemma4v": 70, "gemma4uv": 70}


@dataclass(eq=False)
class Encoded:
    """An image as a context reads it.

    cells: as in the tokens of a text; embeddings (n_cells, width); offsets: 1 or 4 positions for
    each cell, by dimension, counted from the position of the first. is_causal: a cell sees only
    the cells before it. in_draft: the image as a draft reads it; None: it leaves the image out.
    """

    cells: array[int]
    embeddings: NDArray[np.float32]
    offsets: array[int]
    is_causal: bool
    in_draft: Encoded | None = None


@dataclass(eq=False)
class _Image:
    """An image that was read: its tokens, and its chunks, whose memory is freed once encoded."""

    tokens: list[int]
    chunks: Any
    encoded: list[Encoded] = field(default_factory=list)  # of each of its parts
    used_at: float = 0.0
    of_draft: _Image | None = None  # the same, read by the draft's projector

    @property
    def n_bytes(self) -> int:
        of_draft = 0 if self.of_draft is None else self.of_draft.n_bytes
        return sum(each.embeddings.nbytes for each in self.encoded) + of_draft


class Projector:
    """A projector of a loaded model. Close it before the model.

    Any thread may call it; one image is encoded at a time. Equal images have equal cells.
    """

    def __init__(
        self, path: Path, model: Model, *, n_threads: int, n_batch: int = defaults.N_BATCH
    ) -> None:
        """`n_batch`: of the context; images whose cells see each other are made to fit into it.

        Raises ModelError for a file that is no projector, or one for another model.
        """
        header = check_projector(path)
        kind = kind_of(header)
        _check_positions(model)
        import llama_cpp.mtmd_cpp as mtmd

        self.path = path
        self._mtmd: Any = mtmd
        self._name = fingerprint_of([path]).encode()
        self._made_for = _made_for(model)
        self._width = self._made_for[1]
        self._breaks = RowBreaks(header)
        self._lock = threading.Lock()
        self._images = OrderedDict[bytes, _Image]()  # by hash, the latest last
        self._of_cells = WeakValueDictionary[bytes, _Image]()
        self._encoded = WeakValueDictionary[bytes, Encoded]()
        self.n_encoded = 0  # images so far
        self.draft: Projector | None = None  # of a draft model, which reads the images, too
        log.hear(mtmd.mtmd_helper_log_set)
        params = mtmd.mtmd_context_params_default()
        self._eval = EvalCallback()
        params.use_gpu = bool(model.devices)
        if not params.use_gpu:  # a GPU would be waited for every few nodes
            params.cb_eval = self._eval.callback
        params.n_threads = n_threads
        if kind in _SCALED:
            params.image_max_tokens = max(n_batch, _SCALED[kind])
        params.print_timings = False
        params.warmup = bool(model.devices)  # reserves GPU memory; on CPUs, it takes seconds
        with listening() as heard:
            self._pointer = mtmd.mtmd_init_from_file(os.fsencode(path), model.pointer, params)
            if not self._pointer:
                raise ModelError(
                    f"llama.cpp does not load the projector {path}: it is damaged, or not made for "
                    f"{model.path.name}; leave it out (--no-mmproj).\n{heard.complaints()}"
                )
        # Whether each cell sees only the cells before it: not in Gemma's images.
        self.is_causal = not mtmd.mtmd_decode_use_non_causal(self._pointer, None)
        self._uses_mrope = bool(mtmd.mtmd_decode_use_mrope(self._pointer))
        end_threads()

    def read(self, data: bytes) -> list[int]:
        """The tokens of an image file: its cells, and tokens around them, without encoding it.

        Raises PromptError for a file that cannot be read.
        """
        check_image(data)
        key = sha256(self._name + data).digest()
        with self._lock:
            found = self._images.get(key)
            if found is None:
                found = self._images[key] = self._parsed(data, key)
                found.of_draft = self._read_by_draft(data, found)
                for cells in images_in(found.tokens):
                    self._of_cells[cells.tobytes()] = found
            found.used_at = monotonic()
            self._images.move_to_end(key)
            self._drop_old()
        return found.tokens

    def check(self, tokens: Sequence[int]) -> int:
        """How many images a text has. Raises PromptError for one that was not read lately."""
        found = images_in(tokens)
        for cells in found:
            if cells.tobytes() not in self._of_cells:
                raise PromptError(
                    "the prompt has cells of an image that is not kept any more; render the "
                    "messages with the image again"
                )
        return len(found)

    def encode(
        self,
        tokens: Sequence[int],
        progress: NamedProgress | None = None,
        *,
        for_draft: bool = True,
    ) -> list[Encoded]:
        """The images of a text. `decode` finds them while the result is referred to.

        Encodes those that are not known, in this thread; if `for_draft`, also with the draft's
        projector. On CPUs, Ctrl-C ends that, and so does what `progress` raises: it is called with
        ("images", n_done, n_all) all the while. Raises PromptError.
        """
        if not self.check(tokens):
            return []
        result, parts = [], images_in(tokens)
        with self._lock:
            for i, cells in enumerate(parts):
                key = cells.tobytes()
                if key not in self._of_cells:
                    self.check(tokens)
                image = self._of_cells[key]
                tick = None if progress is None else partial(progress, "images", i, len(parts))
                if not image.encoded:
                    self._encode(image, tick)
                if for_draft and image.of_draft is not None and not image.of_draft.encoded:
                    self._encode_in_draft(image, tick)
                result.append(self._encoded[key])
        if progress is not None:
            progress("images", len(parts), len(parts))
        end_threads()
        return result

    def decode(
        self, native: _native.Context, context: int, sequence: int, cells: Sequence[int]
    ) -> int:
        """Have a context read an image that `encode` has returned; returns llama_decode's code.

        Raises DecodeError.
        """
        cells = token_array(cells)
        if (image := self._encoded.get(cells.tobytes())) is None:
            raise DecodeError("the text has an image that is not known; send the image again")
        how = sequence, cells, image.embeddings, image.offsets
        try:
            if not image.is_causal:
                log.during(llama_cpp.llama_set_causal_attn, context, False)
            return log.during(native.decode_image, *how, of=native)
        finally:
            if not image.is_causal:
                log.during(llama_cpp.llama_set_causal_attn, context, True)

    def fits(self, model: Model) -> bool:
        """Whether another model reads what it makes: it has the same architecture and width."""
        return _made_for(model) == self._made_for

    def in_draft(self, cells: array[int]) -> Sequence[int]:
        """The cells that the draft reads for those of an image; none: it leaves the image out."""
        found = self._encoded.get(cells.tobytes())
        return () if found is None or found.in_draft is None else found.in_draft.cells

    @property
    def pointer(self) -> Any:
        if self._pointer is None:
            raise ClosedError("this engine is closed; load it again")
        return self._pointer

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        with self._lock:
            for image in self._images.values():
                self._drop(image)
            self._images.clear()
            if self._pointer:
                with listening():
                    self._mtmd.mtmd_free(self._pointer)
            self._pointer = None

    def _parsed(self, data: bytes, key: bytes) -> _Image:
        mtmd, at = self._mtmd, self.pointer
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        how = mtmd.mtmd_helper_init_opt_default()
        # What is not decoded would be given to ffprobe and ffmpeg as a video: here, none are found.
        how.video_params.ffmpeg_bin_dir = os.fsencode(os.devnull)
        with listening() as heard:
            bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(at, buffer, len(data), False, how)
            if not bitmap:
                raise PromptError(
                    "an image is damaged, or of a rare kind: it cannot be decoded; save it again "
                    "as PNG or JPEG"
                )
            chunks = mtmd.mtmd_input_chunks_init()
            part = mtmd.mtmd_input_part(text=None, bitmap=bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            code = mtmd.mtmd_tokenize_from_parts(at, chunks, parts, 1, False)
            mtmd.mtmd_bitmap_free(bitmap)
            image = _Image([], chunks)
            if code:
                self._free(image)
                raise PromptError(
                    f"the projector cannot read an image (code {code}).\n{heard.complaints()}"
                )
            try:
                for i, chunk in enumerate(self._chunks(image)):
                    image.tokens += self._tokens_of(chunk, key + bytes([i % 256, i // 256]))
            except PromptError:
                self._free(image)
                raise
        return image

    def _read_by_draft(self, data: bytes, image: _Image) -> _Image | None:
        """The image as the draft's projector reads it; None: there is none, or it does not fit.

        For each part, it may have at most as many cells: the draft's context has no more room.
        """
        if self.draft is None:
            return None
        try:
            found = self.draft._parsed(data, sha256(self.draft._name + data).digest())
        except PromptError as error:
            log_failure("the draft reads a text without its image", error)
            return None
        n_most = [len(part) for part in images_in(image.tokens)]
        n_cells = [len(part) for part in images_in(found.tokens)]
        if len(n_cells) == len(n_most) and all(map(le, n_cells, n_most)):
            return found
        self.draft._free(found)
        return None

    def _tokens_of(self, chunk: Any, name: bytes) -> Sequence[int]:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            n = ctypes.c_size_t()
            found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
            tokens: list[int] = found[: n.value]
            if min(tokens, default=0) < 0:
                raise PromptError(
                    "the model has no tokens for the parts of an image that its projector asks "
                    "for; use the projector that was made for the model"
                )
            return tokens
        n_cells = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        return cells_of(name, n_cells, mtmd.mtmd_input_chunk_get_n_pos(chunk))

    def _chunks(self, image: _Image) -> Iterator[Any]:
        for i in range(self._mtmd.mtmd_input_chunks_size(image.chunks)):
            yield self._mtmd.mtmd_input_chunks_get(image.chunks, i)

    def _encode(self, image: _Image, tick: Callable[[], object] | None) -> None:
        mtmd, at, found = self._mtmd, self.pointer, list[Encoded]()
        if tick is not None:
            tick()
        cells = iter(images_in(image.tokens))
        with listening() as heard:
            for chunk in self._chunks(image):
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    continue
                n = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
                with self._eval.during(tick):
                    code = mtmd.mtmd_encode_chunk(at, chunk)
                if code:
                    raise PromptError(
                        f"the projector could not encode an image (code {code}).\n"
                        f"{heard.complaints()}"
                    )
                values = mtmd.mtmd_get_output_embd(at)
                rows = np.ctypeslib.as_array(values, (n, self._width)).copy()
                self._breaks.mend(rows)
                is_causal = not mtmd.mtmd_decode_use_non_causal(at, chunk)
                found.append(Encoded(next(cells), rows, self._offsets(chunk, n), is_causal))
        image.encoded = found
        for each in found:
            self._encoded[each.cells.tobytes()] = each
        self.n_encoded += 1
        self._free(image)
        self._drop_old()

    def _encode_in_draft(self, image: _Image, tick: Callable[[], object] | None) -> None:
        assert self.draft is not None
        assert image.of_draft is not None
        try:
            self.draft._encode(image.of_draft, tick)
        except PromptError as error:
            log_failure("the draft reads a text without its image", error)
            self.draft._free(image.of_draft)
            image.of_draft = None
            return
        for each, in_draft in zip(image.encoded, image.of_draft.encoded, strict=True):
            each.in_draft = in_draft

    def _offsets(self, chunk: Any, n: int) -> array[int]:
        if not self._uses_mrope:
            return array("i", range(n))
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        places = [self._mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n)]
        by_dimension = ([getattr(place, of) for place in places] for of in "tyx")
        return array("i", [*(each for row in by_dimension for each in row), *[0] * n])

    def _free(self, image: _Image) -> None:
        if image.chunks:
            self._mtmd.mtmd_input_chunks_free(image.chunks)
            image.chunks = None

    def _drop_old(self) -> None:
        n_bytes, now = sum(each.n_bytes for each in self._images.values()), monotonic()
        for key, image in list(self._images.items()):
            if now - image.used_at < _SECONDS_KEPT:
                return
            if image.encoded and n_bytes <= _MOST_BYTES:
                continue  # an image not encoded has its pixels: its text was refused
            n_bytes -= image.n_bytes
            self._drop(image)
            del self._images[key]

    def _drop(self, image: _Image) -> None:
        self._free(image)
        if image.of_draft is not None:
            self._free(image.of_draft)


def _made_for(model: Model) -> tuple[str | None, int]:
    """The architecture of a model, and the width of the embeddings that it reads."""
    width = llama_cpp.llama_model_n_embd_inp(model.pointer)
    return meta_text(model.pointer, "general.architecture"), int(width)


def _check_positions(model: Model) -> None:
    """Raise ModelError for a GLM 4 without positions for images: llama.cpp ends the process."""
    rope = llama_cpp.llama_model_rope_type(model.pointer)
    needs_mrope = meta_text(model.pointer, "general.architecture") in _NEED_MROPE
    if needs_mrope and rope != llama_cpp.LLAMA_ROPE_TYPE_MROPE:
        raise ModelError(
            f"{model.path.name} was converted without positions for images; use a newer file, or "
            "leave the projector out (--no-mmproj)"
        )
