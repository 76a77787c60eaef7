"""An RPC server with a device behind it takes layers of the target."""

from __future__ import annotations

from typing import Any

import llama_cpp
import pytest
from device.conftest import (
    ALL,
    ON_CPU,
    PROMPTS,
    ROUNDING,
    LoadPair,
    assert_greedy,
    flash_attention,
    load_pair,
)
from rpc_server import rpc_server

from ggufspec.llama.devices import Device

pytestmark = pytest.mark.skipif(
    not llama_cpp.llama_supports_rpc(), reason="needs llama-cpp-python built with -DGGML_RPC=on"
)
SPLITS: dict[str, dict[str, Any]] = {
    "all of the target there": {"n_gpu_layers": ALL, "tensor_split": (1, 0)},
    "half there, half on the device here": {"n_gpu_layers": ALL, "tensor_split": (1, 1)},
    "half there, half on the CPU": {"n_gpu_layers": 3, "tensor_split": (1, 0)},
    "auto": {"n_gpu_layers": "auto"},
}


@pytest.mark.parametrize("split", SPLITS)
def test_the_text_is_that_of_the_cpu(
    split: str, device: Device, load: LoadPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ggufspec.llama")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    how: dict[str, Any] = {"n_gpu_layers_draft": ALL, "flash_attention": flash_attention(device)}
    with (
        rpc_server(device.name) as server,
        load_pair(rpc=[server.address], **how, **SPLITS[split]) as engine,
    ):
        taken = f"RPC0[{server.address}] model buffer size"
        assert (taken in caplog.text) == (split != "auto"), "the device here has room for all"
        for n_draft in (3, "auto"):
            done = engine.generate(PROMPTS[0], n_draft=n_draft, **options)
            assert_greedy(done, load(**ON_CPU), PROMPTS[0], ROUNDING["f16"])
