"""LoRA adapters of a pair: texts with and without drafts, heads, memory, profiles."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import gguf
import head_pairs
import lora
import numpy as np
import pytest
import tiny
from greedy import assert_same

import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.engine import fit
from ggufspec.engine.engine import Engine
from ggufspec.engine.load_options import LoadOptions
from ggufspec.errors import ModelError, OptionError
from ggufspec.measure.pairs import pair_key, profile_key
from ggufspec.models.adapters import Adapter
from ggufspec.models.header import read_header
from ggufspec.placement.speeds import Gpu
from ggufspec.standin.embedded import embedded_draft, embedded_target

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
Q = {"blk.0.attn_q.weight": (256, 256), "blk.2.ffn_up.weight": (256, 768)}


def loaded(*files: Path, **how: Any) -> Engine:
    return ggufspec.load(*files, **{"n_threads": 1, "n_ctx": 256, "tuned": False, **how})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return lora.write_lora(tmp_path / "lora.gguf")


def test_drafts_do_not_change_the_text_of_an_adapted_target(tmp_path: Path) -> None:
    file = lora.write_lora(tmp_path / "lora.gguf", Q, gain=0.3)
    with loaded(embedded_target(), embedded_draft(), lora=[(file, 0.5)], n_slots=3) as engine:
        prompts = ["Once upon a time", "The prince", "It was"]
        texts = engine.generate_batch(prompts, **GREEDY, n_draft=3, drafter="model")
        assert sum(text.stats.n_accepted for text in texts) > 0
        for prompt, text in zip(prompts, texts, strict=True):
            plain = engine.generate(prompt, **GREEDY, drafter="none")
            assert_same(engine, prompt, text.tokens, plain.tokens, **GREEDY)


def test_a_draft_has_adapters_of_its_own(target: Path, adapter: Path) -> None:
    shares = []
    for of_draft in ([], [adapter]):
        with loaded(target, target, lora=[adapter], lora_draft=of_draft) as engine:
            stats = engine.generate("hello world", **GREEDY, n_draft=3, drafter="model").stats
            shares.append(stats.n_accepted / stats.n_drafted)
    assert shares[0] < 0.9
    assert shares[1] == 1


def test_a_head_drafts_for_an_adapted_target(tmp_path: Path) -> None:
    pair = head_pairs.eagle3(tmp_path)
    header = read_header(pair.target)
    name = "blk.0.ffn_gate.weight"
    shape = header.tensor(name).shape
    file = lora.write_lora(tmp_path / "lora.gguf", {name: shape}, architecture=header.architecture)
    with loaded(pair.target, pair.draft, lora=[file]) as engine:
        found = engine.generate("hello world", **GREEDY, n_draft=3, drafter="model")
        assert found.stats.n_drafted > 0
        plain = engine.generate("hello world", **GREEDY, drafter="none")
        assert_same(engine, "hello world", found.tokens, plain.tokens, **GREEDY)
    with pytest.raises(OptionError, match=r"the draft is a head.*leave out lora_draft"):
        loaded(pair.target, pair.draft, lora_draft=[file])


def test_a_wrong_adapter_is_refused_before_loading(target: Path, tmp_path: Path) -> None:
    wrong = lora.write_lora(tmp_path / "lora.gguf", {"blk.0.attn_q.weight": (64, 32)})
    for how in ({"lora": [wrong]}, {"lora_draft": [wrong]}):
        with pytest.raises(ModelError, match="not a LoRA adapter of this model"):
            loaded(target, target, **how)
    for files in ((wrong,), (target, wrong)):
        with pytest.raises(ModelError, match="not a model: name it with --lora"):
            loaded(*files)


def test_another_adapter_or_scale_is_another_pair(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    files = [lora.write_lora(tmp_path / f"{i}.gguf", seed=i) for i in range(2)]
    of_draft = lora.write_lora(tmp_path / "of_draft.gguf", {"blk.0.attn_q.weight": (32, 32)})
    ways: list[dict[str, Any]] = [
        {},
        {"lora": [files[0]]},
        {"lora": [files[1]]},
        {"lora": [(files[0], 0.5)]},
        {"lora": files},
        {"lora_draft": [of_draft]},
    ]
    keys, pairs = set(), set()
    for way in ways:
        with loaded(target, draft, **way) as engine:
            at, its = engine.pair.target, engine.pair.draft
            assert its is not None
            keys.add(profile_store.key(profile_key(at, its)))
            pairs.add(str(pair_key(at.model, its.model, at.options)))
    assert len(keys) == len(pairs) == len(ways)


def test_their_memory_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with room for target and draft, and not for an adapter of the first layer."""
    target = tiny.write_llama(tmp_path / "target.gguf", n_embd=512)  # starting kernels takes time
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_embd=512, n_layer=1)
    rank, name = 2**18, "blk.0.ffn_down.weight"
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    for end, shape in (("a", (rank, 1024)), ("b", (512, rank))):
        n_bytes = 4 * math.prod(shape)
        writer.add_tensor_info(f"{name}.lora_{end}", shape, np.dtype(np.float32), n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(tmp_path / "lora.gguf", 2**31)  # only its header is read
    monkeypatch.setattr(fit, "gpus", lambda: (Gpu("GPU", 1000 * 2**20),))
    adapter = (Adapter(tmp_path / "lora.gguf"),)
    alone, adapted, below = (
        fit.Fit(LoadOptions(target, draft, lora=its, lora_draft=of_draft)).first()
        for its, of_draft in (((), ()), (adapter, ()), ((), adapter))
    )
    assert (alone.n_gpu_layers, alone.n_gpu_layers_draft) == (3, 2)
    assert (adapted.n_gpu_layers, below.n_gpu_layers_draft) == (0, 0)
