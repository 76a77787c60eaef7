"""llama.cpp's own sampler chain for a Sampling: the reference in tests and benchmarks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec.common import defaults
from ggufspec.decoding.sampling import Sampling
from ggufspec.llama.vocab import Vocab

_SEED = 1


class SamplerChain:
    """The samplers in llama.cpp's order, with one at the end that draws. Close it."""

    def __init__(
        self, sampling: Sampling, n_vocab: int, *, n_ctx: int, vocab: Vocab | None = None
    ) -> None:
        """`n_ctx`: what a window of -1 means. DRY needs the vocabulary; it has default breakers."""
        self._n_vocab = n_vocab
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        self.drawn = -1  # by the last apply
        self._data = (llama_cpp.llama_token_data * n_vocab)()
        self._all = self._rows = np.ctypeslib.as_array(self._data)
        self._tokens = np.arange(n_vocab)
        self.apply_seconds = 0.0  # inside llama_sampler_apply so far
        if sampling.logit_bias:
            biases = (llama_cpp.llama_logit_bias * len(sampling.logit_bias))(
                *(llama_cpp.llama_logit_bias(*pair) for pair in sampling.logit_bias.items())
            )
            self._add(llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
        names, last = sampling.samplers, "dist"
        if sampling.mirostat:
            names, last = ("temperature",), f"mirostat_{sampling.mirostat}"
        elif "adaptive_p" in names:
            names, last = [name for name in names if name != "adaptive_p"], "adaptive_p"
        for name in (*names, last):
            self._add(_makers(sampling, n_vocab, n_ctx, vocab)[name]())

    def _add(self, sampler: Any) -> None:
        assert sampler
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def accept(self, tokens: Sequence[int]) -> None:
        """Tell the chain which tokens were generated."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def probs(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The distribution (n_vocab) of a row of logits (n_vocab) after what was accepted."""
        size = self.apply(logits)
        found = np.zeros(self._n_vocab)
        found[self._rows["id"][:size]] = self._rows["p"][:size]
        return found

    def apply(self, logits: NDArray[np.float32]) -> int:
        """Run the chain over a row of logits (n_vocab); how many candidates it leaves."""
        self._all["id"] = self._tokens
        self._all["logit"] = logits
        candidates = llama_cpp.llama_token_data_array(self._data, self._n_vocab, -1, False)
        start = perf_counter()
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(candidates))
        self.apply_seconds += perf_counter() - start
        # A sampler that skips tokens at the start moves the address.
        skipped = ctypes.addressof(candidates.data.contents) - ctypes.addressof(self._data)
        first = skipped // ctypes.sizeof(llama_cpp.llama_token_data)
        assert 0 <= first <= self._n_vocab - candidates.size
        self._rows = self._all[first : first + candidates.size]
        self.drawn = int(self._rows["id"][candidates.selected])
        return int(candidates.size)

    def close(self) -> None:
        """Free the memory."""
        llama_cpp.llama_sampler_free(self._chain)


def _makers(
    sampling: Sampling, n_vocab: int, n_ctx: int, vocab: Vocab | None
) -> dict[str, Callable[[], Any]]:
    def window(n: int) -> int:
        return n_ctx if n < 0 else n

    texts = [text.encode() for text in defaults.DRY_SEQUENCE_BREAKERS]
    return {
        "penalties": lambda: llama_cpp.llama_sampler_init_penalties(
            n_vocab,
            window(sampling.repeat_last_n),
            sampling.repeat_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        ),
        "dry": lambda: llama_cpp.llama_sampler_init_dry(
            None if vocab is None else vocab.pointer,
            sampling.dry_multiplier if vocab is not None else 0.0,
            sampling.dry_base,
            sampling.dry_allowed_length,
            window(sampling.dry_penalty_last_n),
            (ctypes.c_char_p * len(texts))(*texts),
            len(texts),
        ),
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(sampling.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(sampling.top_k),
        "typical_p": lambda: llama_cpp.llama_sampler_init_typical(sampling.typical_p, 0),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(sampling.top_p, 0),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(sampling.min_p, 0),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(
            sampling.xtc_probability, sampling.xtc_threshold, 0, _SEED
        ),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            sampling.temperature,
            0.0 if sampling.mirostat else sampling.dynatemp_range,
            sampling.dynatemp_exponent,
        ),
        "mirostat_1": lambda: llama_cpp.llama_sampler_init_mirostat(
            n_vocab, _SEED, sampling.mirostat_tau, sampling.mirostat_eta, 100
        ),
        "mirostat_2": lambda: llama_cpp.llama_sampler_init_mirostat_v2(
            _SEED, sampling.mirostat_tau, sampling.mirostat_eta
        ),
        "adaptive_p": lambda: llama_cpp.llama_sampler_init_adaptive_p(
            sampling.adaptive_target, sampling.adaptive_decay, _SEED
        ),
        "dist": lambda: llama_cpp.llama_sampler_init_dist(_SEED),
    }
