"""A llama.cpp context: the KV cache of a few sequences, and batches to decode into it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.common.facts import counted
from ggufspec.common.failures import closed_on_error
from ggufspec.decoding.types import Logits, token_array
from ggufspec.errors import ClosedError, DecodeError, ModelError, OptionError, OutOfMemoryError
from ggufspec.llama import context_options
from ggufspec.llama.context_options import FLASH_ATTENTION, KV_TYPES, OWN, ContextOptions, choice
from ggufspec.llama.devices import address_of, n_threads_default
from ggufspec.llama.hidden_states import BatchPart, Follower, Parts, PassStopped, addresses
from ggufspec.llama.log import listening, log
from ggufspec.llama.model import Model
from ggufspec.llama.projector import Projector
from ggufspec.llama.state import State, set_state, state_of
from ggufspec.llama.thread_count import ThreadCount
from ggufspec.llama.threadpool import ThreadPools
from ggufspec.models import head_facts
from ggufspec.models.head_facts import EAGLE3, MTP, HeadFacts

_MAX_SEQUENCES = 256  # of llama.cpp
_STOPPED = 2  # llama_decode's code for a pass that its abort callback has ended
_MAX_CELLS = 2**32 - 1  # llama.cpp takes a larger number modulo 2**32
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class HeadLink(NamedTuple):
    """Links the context of a head to the `target` that it drafts for: see llama/head.py."""

    target: Context
    facts: HeadFacts


class Context:
    """A context of a model, for sequences 0, 1 ... Close it before its model.

    Methods that call llama.cpp raise ClosedError after close.
    """

    def __init__(
        self,
        model: Model,
        options: ContextOptions,
        link: HeadLink | None = None,
        pools: ThreadPools | None = None,
    ) -> None:
        """`link`: given for the context of a head.

        `pools`: shared with contexts that never compute at the same time; None: its own, or those
        of a head's target. Raises OptionError for unknown values, OutOfMemoryError.
        """
        if model.n_ctx_max is not None and options.n_ctx > model.n_ctx_max:
            raise OptionError(
                f"a context of {options.n_ctx:,} tokens is too long for {model.path}, which has "
                f"{model.n_ctx_max:,} positions; choose at most that (n_ctx, -c)"
            )
        context_options.check_kept(model, options, is_head=link is not None)
        self.model = model
        self.options = options
        self.link = link  # None: not the context of a head
        self.n_threads_now = self.n_threads = options.n_threads or n_threads_default()  # at most
        varies = options.varies_threads and self.n_threads > 1
        self._thread_count = ThreadCount(self.n_threads) if varies else None
        self.seconds_by_threads: dict[int, float] = {}  # in llama_decode
        self.keeps_threads = False  # with flash attention, rounding depends on them
        self.n_ctx, self.n_sequences = options.n_ctx, options.n_sequences
        # A shared pass needs a unified cache; otherwise all sequences need equally many tokens. Not
        # with windows: cells that a window has passed are reused, so none can go back.
        can_drop_tail = link is not None or model.can_drop_tail
        # Nor with a head of several layers: each reads a text into the cells of those before.
        is_separate = model.has_windows or (link is not None and link.facts.n_layers > 1)
        self.can_share_passes = options.n_sequences > 1 and can_drop_tail and not is_separate
        self.follower: Follower | None = None  # reads its hidden states
        self.projector: Projector | None = None  # then the native context has_images, too
        # llama.cpp keeps a row of logits for each leaf.
        n_leaves = min(options.n_leaves, options.n_rows, _MAX_SEQUENCES // options.n_sequences)
        self.reads_trees = link is None and can_drop_tail and not is_separate
        self.n_leaves = max(n_leaves, 1) if self.reads_trees else 1  # maximum leaves of a tree
        is_eagle3 = link is not None and link.facts.kind == EAGLE3
        block = link.facts.block if link is not None else None
        # Width of the hidden states that it reads.
        self.n_hidden = 0 if link is None else model.n_embd if is_eagle3 else model.n_embd_out
        if link is not None and block is not None:
            self.n_hidden = len(link.facts.target_layers) * model.n_embd
        self.n_left_out = [0] * options.n_sequences  # tokens per text: see ShortCache
        n_batch = min(options.n_batch, options.n_kept or options.n_ctx)
        if is_eagle3 or block:
            n_batch = min(n_batch, head_facts.DFLASH_BATCH if block else head_facts.EAGLE3_BATCH)
        self.n_batch = max(n_batch, options.n_rows * options.n_sequences)
        # Maximum rows of logits per sequence in a batch.
        self.n_rows = min(head_facts.EAGLE3_ROWS, self.n_batch) if is_eagle3 else options.n_rows
        # Maximum rows in a batch of all sequences; one sequence alone may have as many.
        self._block = block  # of a head that reads blocks of tokens, or hidden states alone
        # Tokens that one pass predicts when it is a draft.
        self.n_per_step = max(options.n_rows - block.first, 1) if block is not None else 1
        # Such a head computes the block of one sequence at a time.
        self._n_rows_of_all = options.n_rows * (1 if block else options.n_sequences)
        self.n_outputs = max(self.n_rows, self._n_rows_of_all)
        # A head's own padding at the end of a row is left out: its rows are read one by one.
        self.n_vocab: int = link.target.n_vocab if link is not None else model.vocab.n_tokens
        # Views of llama.cpp's buffer by address: slicing them is cheaper than making new ones.
        self._rows: dict[int, list[Logits]] = {}
        self.pools: ThreadPools = pools or (link.target.pools if link else ThreadPools())
        self._pointer: int | None = self._make(options)
        n_rollback = int(llama_cpp.llama_n_rs_seq(self._pointer))  # 0: not by this architecture
        # Tokens at the end of the last decode, but its first, that can be dropped; None: all held.
        self.n_droppable = None if can_drop_tail else n_rollback
        with closed_on_error(self.close):
            memory = llama_cpp.llama_get_memory(self._pointer)
            if not memory:
                raise ModelError(
                    f"{model.path} has no KV cache ({model.description}): it makes embeddings. "
                    "Speculative decoding needs a model that writes text"
                )
            with listening():
                self.pools.attach(self._pointer, self.n_threads, self._n_threads_batch)
                if block is not None:
                    llama_cpp.llama_set_causal_attn(self._pointer, block.is_causal)
                self._native = _native.Context(
                    address_of(self._pointer),
                    address_of(memory),
                    self.n_batch,
                    self.n_sequences,
                    self.n_leaves,
                    self.n_hidden,
                    block is not None,
                    n_rollback,
                    link is not None and link.facts.shares_cache,
                    **addresses(),
                )
                self._native.uses_attention = options.flash_attention == OWN

    def _make(self, options: ContextOptions) -> int:
        if options.n_cells * options.n_sequences > _MAX_CELLS:
            raise OptionError(
                f"a {options.description} exceeds llama.cpp's limit of {_MAX_CELLS:,} tokens; use "
                "a smaller one (n_ctx, -c)"
            )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.n_cells * options.n_sequences
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = options.n_sequences * self.n_leaves
        is_unified = options.is_unified or self.can_share_passes
        params.kv_unified = is_unified or self.n_leaves > 1
        params.n_outputs_max = self._n_rows_of_all
        params.op_offload = options.offloads
        # llama.cpp aborts the process unless a batch holds more than n_rs_seq + 1 tokens.
        params.n_rs_seq = max(min(options.n_rollback, self.n_batch - 2), 0)
        params.n_threads, params.n_threads_batch = self.n_threads, self._n_threads_batch
        is_quantized = not {options.type_k, options.type_v} <= {"f32", "f16", "bf16"}
        if options.flash_attention == "off" and is_quantized:
            # llama.cpp rejects some of these; with others it computes wrong logits or aborts.
            raise OptionError(
                f"KV caches of type {options.type_k} and {options.type_v} need flash attention: "
                "leave it on auto (flash_attention, -fa), or use f16 caches (type_k, type_v; -ctk, "
                "-ctv)"
            )
        params.flash_attn_type = choice(FLASH_ATTENTION, options.flash_attention, "flash attention")
        params.type_k = choice(KV_TYPES, options.type_k, "type of the K cache")
        params.type_v = choice(KV_TYPES, options.type_v, "type of the V cache")
        if self.link is None:
            context_options.check_cache(self.model, options)
        else:
            params.ctx_other = self.link.target.pointer
            if self.link.facts.kind == MTP:
                params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        with listening() as log:
            pointer: int | None = llama_cpp.llama_init_from_model(self.model.pointer, params)
            if not pointer:
                raise OutOfMemoryError(
                    f"no {options.description} could be made for {self.model.path}: "
                    "use a smaller context (n_ctx, -c), fewer GPU layers (n_gpu_layers, -ngl), or "
                    f"another cache type.\n{log.complaints()}"
                )
        self.model.adapt(pointer)
        return pointer

    @property
    def pointer(self) -> int:
        """The llama_context pointer."""
        if self._pointer is None:
            raise ClosedError("this context is closed; load the model again")
        return self._pointer

    @property
    def native(self) -> _native.Context:
        """The extension's context, which tracks and changes cells."""
        self.pointer  # noqa: B018  (raises)
        return self._native

    def n_cells(self, sequence: int = 0) -> int:
        """How many tokens a sequence holds."""
        return self._native.n_cells(sequence)

    def n_common(self, tokens: array[int], sequence: int = 0) -> int:
        """How many tokens at the start of `tokens` a sequence holds."""
        return self.native.n_common(tokens, sequence)  # type: ignore[arg-type]

    def resume(self, tokens: array[int], n_most: int, sequence: int = 0) -> int:
        """Truncate a sequence to its common prefix with the first `n_most` of `tokens`.

        Returns how many remain; -1: the tail cannot be dropped, and a checkpoint must be restored.
        """
        return self.native.resume(tokens, n_most, sequence)  # type: ignore[arg-type]  # int32

    def decode(
        self, tokens: Sequence[int], n_rows: int, sequence: int = 0, parents: Sequence[int] = ()
    ) -> None:
        """Evaluate `tokens` after those that are held, and keep logits of the last `n_rows`.

        `parents`: see BatchPart. A tree is held until the next resume, truncate or decode of the
        sequence: resume keeps the path along its tokens, the others keep the first path.
        The context of a head reads zeros as hidden states, which is for timing only; a head of
        blocks reads hidden states without tokens if no logits are kept. Raises ValueError for more
        than n_leaves leaves, DecodeError, PassStopped, and KeyboardInterrupt within a batch; the
        sequence then holds none of the tokens.
        """
        self.decode_together([BatchPart(sequence, tokens, n_rows, parents)])

    def decode_hidden(
        self, tokens: Sequence[int], hidden: NDArray[np.float32], n_rows: int, sequence: int = 0
    ) -> None:
        """`decode` for the context of a head: hidden (n_tokens, n_hidden), beside each token."""
        self.decode_together([BatchPart(sequence, tokens, n_rows)], hidden)

    def decode_beside(self, parts: Parts, other: Context, of_other: Parts) -> None:
        """`decode_together` of two contexts at the same time; `other` computes in its own thread.

        Not for a head or its target. With shared pools, or images, one after the other. Raises
        what `decode` raises, which stops both; a sequence then holds all of its new tokens or none.
        """
        has_image = parts[0].tokens[0] < 0 or of_other[0].tokens[0] < 0
        if has_image or self.pools.excludes(other.pools):
            self.decode_together(parts)
            other.decode_together(of_other)
            return
        natives = self._checked(parts), other._checked(of_other)
        began = self.decode_seconds, other.decode_seconds
        results = log.during(natives[0].decode_beside, parts, natives[1], of_other, of=natives[0])
        self._count_seconds(began[0])
        other._count_seconds(began[1])
        self._finish(parts, results[0])
        other._finish(of_other, results[1])

    def decode_together(self, parts: Parts, hidden: NDArray[np.float32] | None = None) -> None:
        """`decode` of parts of different sequences in one pass, of at most n_batch tokens.

        hidden: see decode_hidden, of the only part.
        """
        native = self._checked(parts)
        n_tokens = sum([len(part.tokens) for part in parts])
        count = self._count_threads(n_tokens)
        began = native.decode_seconds
        positions = [native.n_cells(part.sequence) for part in parts] if self.follower else ()
        if hidden is None and self._block is not None and not parts[0].n_rows:
            hidden = np.zeros((len(parts[0].tokens), self.n_hidden), np.float32)
            parts = [parts[0]._replace(tokens=token_array(parts[0].tokens))]
        if self.projector is not None and hidden is None and parts[0].tokens[0] < 0:
            result = self.projector.decode(native, self.pointer, *parts[0][:2])
        elif hidden is None:
            result = log.during(native.decode, parts, of=native)
        else:
            (sequence, tokens, n_rows, _), *_ = parts
            result = log.during(native.decode_hidden, sequence, tokens, hidden, n_rows, of=native)
        if result:
            self._finish(parts, result)
        seconds = self._count_seconds(began)
        if count is not None:
            count.observe(n_tokens, seconds)
        if self.follower is not None:
            self.follower.after_decode(parts, positions)

    def _count_threads(self, n_tokens: int) -> ThreadCount | None:
        """Use the number of threads for a pass; returns what chose it, None: nothing."""
        depends = self.keeps_threads and self.options.flash_attention not in ("off", OWN)
        count = None if depends else self._thread_count
        n_threads = self.n_threads if count is None else count.n_for(n_tokens)
        if n_threads != self.n_threads_now:
            self._set_threads(n_threads)
        return count

    def _count_seconds(self, began: float) -> float:
        of_all, n = self.seconds_by_threads, self.n_threads_now
        seconds = self.decode_seconds - began
        of_all[n] = of_all.get(n, 0.0) + seconds
        return seconds

    def _checked(self, parts: Parts) -> _native.Context:
        native = self.native
        if (n_rows := max((part.n_rows for part in parts), default=0)) > self.n_outputs:
            raise DecodeError(f"the context keeps {self.n_outputs} rows of logits, not {n_rows}")
        if self.n_threads > 1:
            self.pools.check()
        return native

    def _finish(self, parts: Parts, result: int) -> None:
        """Raise the error that llama_decode's code stands for, if any, after decoding `parts`."""
        if result == _STOPPED and self._native.is_stopped:
            raise PassStopped
        if result:
            n_tokens = sum(len(part.tokens) for part in parts)
            where = f"at position {self.n_cells(parts[0].sequence)}"
            if len(parts) > 1:
                where = f"of {len(parts)} sequences in one pass"
            what = f"{counted(n_tokens, 'token')} {where} (code {result}).\n{log.complaints()}"
            log.clear()
            raise DecodeError(f"llama.cpp could not decode {what}")

    def rows(self, first: int, n_rows: int) -> Logits:
        """Logits (n_rows, n_vocab) of the last batch, from its token `first` on.

        A view of llama.cpp's buffer, valid until the next decode.
        """
        address = self.native.logits(first)
        views = self._rows.get(address)
        if views is None:
            if not address:
                raise DecodeError(f"llama.cpp kept no logits of token {first} of the last batch")
            if len(self._rows) >= self.n_rows * self.n_sequences:
                self._rows.clear()  # the buffer has moved
            rows = _native.rows_at(address, self.n_outputs, self.n_vocab)
            # Made once: cheaper than a slice in each round.
            views = self._rows[address] = [rows[:n] for n in range(len(rows) + 1)]
        return views[n_rows]

    def truncate(self, n_tokens: int, sequence: int = 0) -> bool:
        """Keep the first `n_tokens` of a sequence; False if its tail cannot be dropped."""
        return self.native.truncate(n_tokens, sequence)

    def copy_prefix(self, source: int, sequence: int, tokens: array[int]) -> None:
        """Share the cells of a prefix of `tokens` that `source` holds. Needs droppable tails."""
        self.native.copy_prefix(source, sequence, tokens)  # type: ignore[arg-type]

    def stop(self, is_stopped: bool) -> None:
        """From any thread: True ends the pass in progress (on CPUs) and later ones: PassStopped."""
        self._native.is_stopped = is_stopped

    @property
    def is_disturbed(self) -> bool:
        """Whether the last pass took longer than usual, or tried another number of threads."""
        return self._thread_count is not None and not self._thread_count.is_usual

    @property
    def decode_seconds(self) -> float:
        """Wall time inside llama_decode so far."""
        return self._native.decode_seconds

    @property
    def _n_threads_batch(self) -> int:
        """Threads of passes over several tokens; a head uses as many as its target."""
        return max(self.n_threads, self.link.target.n_threads if self.link else 0)

    def use_threads(self, n_threads: int) -> None:
        """Compute with `n_threads` from now on, whatever else runs."""
        self.n_threads, self._thread_count = n_threads, None
        self._set_threads(n_threads)

    def _set_threads(self, n_threads: int) -> None:
        n_batch = self._n_threads_batch if n_threads == self.n_threads else n_threads
        self.n_threads_now = n_threads
        log.during(self.pools.attach, self.pointer, n_threads, n_batch)
        log.during(llama_cpp.llama_set_n_threads, self.pointer, n_threads, n_batch)

    def n_bytes(self, sequence: int = 0) -> int:
        """Bytes of a copy of what a sequence holds."""
        return int(log.during(llama_cpp.llama_state_seq_get_size_ext, self.pointer, sequence, 0))

    def checkpoint(self, sequence: int = 0) -> State:
        """A copy of the present state of recurrent layers, or of the cells that windows see."""
        return state_of(self.pointer, sequence, _PARTIAL, "the model's state")

    def restore(self, saved: State, n_cells: int, sequence: int = 0) -> None:
        """Go back to a checkpoint of `n_cells` tokens; the caller then truncates to that length."""
        self.native.begin_restore(n_cells, sequence)
        with listening():
            read = set_state(self.pointer, sequence, _PARTIAL, saved)
        if read == 0:
            self.truncate(0, sequence)
            raise DecodeError(f"llama.cpp did not restore {saved.size} bytes of the model's state")
        self.native.end_restore(sequence)

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        if self._pointer is not None:
            with listening():
                llama_cpp.llama_free(self._pointer)
                self.pools.release(self._pointer)
            self._pointer = None
