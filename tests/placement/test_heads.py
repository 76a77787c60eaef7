"""What heads take beside their target, as predicted and as llama.cpp says; and where they go."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import llama_cpp
import paper
import pytest
import tiny_heads

from ggufspec.llama.log import listening
from ggufspec.models.gguf_file import GgufFile, Tensor
from ggufspec.models.head_facts import DFLASH_BATCH, EAGLE3_BATCH, MTP
from ggufspec.models.header import read_header
from ggufspec.models.shape import ModelShape, draft_shape, shape_of
from ggufspec.placement.memory import CacheParams, ModelMemory, cache_bytes
from ggufspec.placement.plan import PlacementOptions, alternatives, describe, plan_offload
from ggufspec.placement.speeds import Bandwidths, Gpu, Machine, PassTimes
from ggufspec.standin import plan

TABLE = tiny_heads.Table()
HEAD = tiny_heads.Head(table=TABLE)
GIB = 2**30


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return tiny_heads.write_glm4moe(tmp_path / "glm.gguf", TABLE, HEAD, n_layer=3)


def head_beside(target: Path, draft: Path | None = None) -> ModelShape:
    return draft_shape(read_header(target), draft or MTP)[0]


def test_layers_of_a_head_count_only_where_it_drafts(glm: Path, tmp_path: Path) -> None:
    trunk = tiny_heads.write_glm4moe(tmp_path / "t.gguf", TABLE, HEAD, n_layer=3, part="trunk")
    whole, without = (shape_of(read_header(path)) for path in (glm, trunk))
    assert whole.layers == without.layers
    assert whole.n_pass_bytes == without.n_pass_bytes
    assert whole.n_layers == 4, "as llama.cpp counts layers for GPUs"
    assert not whole.layers[-1].n_bytes
    head = head_beside(glm)
    assert [layer.n_kv_values for layer in head.layers] == [whole.layers[0].n_kv_values]
    n_own = sum(tensor.n_bytes for tensor in read_header(glm).mtp_tensors)
    assert head.n_bytes == n_own, "the output matrix is the target's"
    assert n_own / 2 < head.n_pass_bytes - whole.n_output_bytes < n_own, "one expert of two"


def test_a_head_of_its_own_file_has_its_own_layers_only(glm: Path, tmp_path: Path) -> None:
    path = tiny_heads.write_glm4moe(tmp_path / "mtp.gguf", TABLE, HEAD, n_layer=3, part="head")
    inside, alone = head_beside(glm), head_beside(glm, path)
    assert alone.layers[-1] == inside.layers[0]
    assert not sum(layer.n_bytes + layer.n_kv_values for layer in alone.layers[:-1])
    assert alone.n_pass_bytes == inside.n_pass_bytes
    at = Bandwidths()
    assert PassTimes(alone, at).seconds(5) == pytest.approx(PassTimes(inside, at).seconds(2))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_memory_of_a_head_is_within_5_percent(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = paper.write(tmp_path / "target.gguf", paper.LLAMA_3_8B)
    draft = _write_head(tmp_path / f"{kind}.gguf", kind)
    n_most = EAGLE3_BATCH if kind == "eagle3" else DFLASH_BATCH
    shape, caches = head_beside(target, draft), CacheParams(4096, 512)
    assert shape.n_shared_bytes == 0
    with ExitStack() as stack:
        models = []
        for path in (target, draft):
            params = llama_cpp.llama_model_default_params()
            params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
            with listening():
                models.append(llama_cpp.llama_model_load_from_file(str(path).encode(), params))
            stack.callback(llama_cpp.llama_model_free, models[-1])
        other = None
        for model, n_batch in zip(models, (512, n_most), strict=True):
            options = llama_cpp.llama_context_default_params()
            options.n_ctx, options.n_seq_max, options.n_outputs_max = caches.n_ctx, 1, 1
            options.n_batch = options.n_ubatch = n_batch
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            options.ctx_other = other
            caplog.clear()
            with caplog.at_level("DEBUG", logger="ggufspec.llama"), listening():
                other = llama_cpp.llama_init_from_model(model, options)
            assert other
            stack.callback(llama_cpp.llama_free, other)
    lines = [line for line in caplog.messages if "compute buffer size" in line]
    found = sum(float(line.split("=")[1].split()[0]) for line in lines) * 2**20
    assert ModelMemory(shape, caches).buffers.alone == pytest.approx(found, rel=0.05)
    assert cache_bytes(shape, caches) == (16 * 2**20,)


def _write_head(path: Path, kind: str) -> Path:
    """A head for Llama 3 8B with 32,000 tokens, without its weights."""
    n, n_ff, n_kv, n_own = 4096, 14336, 1024, 32_000
    norms, n_in = ("attn_norm", "attn_norm_2", "ffn_norm"), 2 * n
    own: dict[str, tuple[int, ...]] = {}
    if kind == "dflash":
        norms, n_in = ("attn_norm", "ffn_norm"), n
        own = {f"blk.0.attn_{of}_norm.weight": (128,) for of in "qk"}
        own["enc.output_norm.weight"] = (n,)
    shapes = own | {
        "fc.weight": (3 * n, n),
        "output_norm.weight": (n,),
        "output.weight": (n, n_own),
        "d2t": (n_own,),
        **{f"blk.0.{name}.weight": (n,) for name in norms},
        "blk.0.attn_q.weight": (n_in, n),
        "blk.0.attn_k.weight": (n_in, n_kv),
        "blk.0.attn_v.weight": (n_in, n_kv),
        "blk.0.attn_output.weight": (n, n),
        "blk.0.ffn_gate.weight": (n, n_ff),
        "blk.0.ffn_up.weight": (n, n_ff),
        "blk.0.ffn_down.weight": (n_ff, n),
    }
    types = {"d2t": "I64"} | {name: "F16" for name, shape in shapes.items() if len(shape) > 1}
    of_target = plan(paper.LLAMA_3_8B).values
    facts: dict[str, object] = {
        "block_count": 1,
        "embedding_length": n,
        "context_length": 8192,
        "feed_forward_length": n_ff,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 128,
        "target_layers": [2, 16, 29],
        "target_hidden_size": n,
    }
    values = {
        "general.architecture": kind,
        "tokenizer.ggml.mask_token_id": 0,
        **{f"{kind}.{key}": value for key, value in facts.items()},
        **{key: value for key, value in of_target.items() if key.startswith("tokenizer")},
    }
    tensors = tuple(Tensor(name, at, types.get(name, "F32")) for name, at in shapes.items())
    file = GgufFile(values, tensors, lambda: ())
    path.write_bytes(file.header)
    os.truncate(path, file.n_bytes)
    return path


@pytest.mark.parametrize("n_gpu_layers", [None, 0, 1, -1])
def test_a_head_in_the_targets_file_is_where_the_target_is(
    glm: Path, n_gpu_layers: int | None
) -> None:
    target, head = shape_of(read_header(glm)), head_beside(glm)
    machine = Machine((Gpu("a", 8 * GIB), Gpu("b", 8 * GIB)), 64 * GIB)
    options = PlacementOptions(n_gpu_layers=n_gpu_layers, n_gpu_layers_draft=0, n_draft=3)
    found = plan_offload(target, head, machine, options)
    assert found.n_gpu_layers_draft == min(found.n_gpu_layers, 2)
    assert found.draft_gpu == (1 if found.n_gpu_layers else None)
    assert "of the draft" not in describe(found, target, head, machine)
    names = [name for name, _ in alternatives(target, head, machine, options)]
    assert "draft on CPU" not in names


def test_a_head_takes_memory_beside_its_target(glm: Path) -> None:
    target, head = shape_of(read_header(glm)), head_beside(glm)
    alone, both = (
        plan_offload(target, draft, Machine((), None), PlacementOptions()).host_bytes
        for draft in (None, head)
    )
    assert both - alone == ModelMemory(head, CacheParams(256, 512, n_rows=1)).use(0).host
