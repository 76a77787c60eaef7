"""The addresses of llama.cpp's functions that the extension calls."""

from __future__ import annotations

import llama_cpp

from ggufspec.errors import ModelError
from ggufspec.llama.devices import address_of

_FUNCTIONS = (
    "llama_decode",
    "llama_synchronize",
    "llama_get_logits_ith",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_set_abort_callback",
)
_BATCH_FIELDS = ["n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"]


def addresses() -> dict[str, int]:
    """Addresses by name. Raises ModelError if llama_batch has other fields than expected."""
    fields = [name for name, _ in llama_cpp.llama_batch._fields_]
    if fields != _BATCH_FIELDS:
        raise ModelError(
            f"this llama-cpp-python has another llama_batch ({', '.join(fields)}) than ggufspec "
            f"was built for ({', '.join(_BATCH_FIELDS)}); install a version that ggufspec supports"
        )
    return {name: address_of(getattr(llama_cpp.llama_cpp._lib, name)) for name in _FUNCTIONS}
