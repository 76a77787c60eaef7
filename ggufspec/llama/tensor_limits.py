"""Refuses caches that are too large for a tensor of a device, for which ggml ends the process."""

from __future__ import annotations

from ggufspec.errors import OutOfMemoryError
from ggufspec.llama.context_options import KV_TYPES, ContextOptions
from ggufspec.llama.devices import offload_devices, takes_tensor
from ggufspec.llama.model import Model


def check_tensors(model: Model, options: ContextOptions) -> None:
    """Raise OutOfMemoryError where the K or V cache of a layer exceeds a device's largest tensor.

    That is a limit of the driver, whatever memory is free: 128 MiB to 4 GiB with Vulkan.
    """
    if (heads := model.heads) is None:
        return
    n_cells = options.n_cells * options.n_sequences * heads.n_kv
    tensors = ((options.type_k, heads.n_keys), (options.type_v, heads.n_values))
    for device in offload_devices():
        if device.name in model.devices and not all(
            takes_tensor(device, KV_TYPES[name], n_cells * n) for name, n in tensors
        ):
            raise OutOfMemoryError(
                f"the cache of a {options.description} has larger tensors than {device.name} "
                f"({device.description}) computes with, for {model.path}: use a smaller one "
                "(n_ctx, -c), caches of another type (-ctk q8_0 -ctv q8_0), or no GPU "
                "layers (-ngl 0; of a draft, -ngld 0)"
            )
