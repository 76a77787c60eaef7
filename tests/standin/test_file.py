"""A stand-in loads, writes its map, and is whole or absent; a draft has its share of the map."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gguf
import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray
from small import MIXTURES, N_VOCAB, small

import ggufspec
from ggufspec import standin
from ggufspec.engine.engine import Engine
from ggufspec.errors import CacheError, ModelError, OptionError
from ggufspec.models.header import read_header
from ggufspec.models.quantization import FILE_TYPES
from ggufspec.models.registry import Dimensions
from ggufspec.models.shape import shape_of
from ggufspec.standin.next_token_table import codes, successors

MAP = successors(N_VOCAB, 1.0)
ONLY_TIED = ("gemma2", "gemma3")
CASES = [
    *(("llama", False, mix) for mix in FILE_TYPES),
    *(
        ("llama", True, mix)
        for mix in ("F16", "Q4_0", "Q8_0", "Q3_K_S", "Q4_K_M", "Q5_K_S", "Q6_K")
    ),
    *(
        (architecture, tied, mix)
        for architecture in ("qwen2", "qwen3", "gpt2", "bloom", "gemma2", "gemma3")
        for tied in (False, True)
        for mix in ("Q4_K_M",)
        if tied or architecture not in ONLY_TIED
    ),
    *((architecture, False, mix) for architecture in MIXTURES for mix in ("Q4_K_M", "MXFP4_MOE")),
]


def written(path: Path, shape: Dimensions, mix: str, agreement: float = 1.0) -> Path:
    standin.write(
        standin.plan(standin.source_from_dimensions("small", shape, mix), agreement), path
    )
    return path


@pytest.mark.parametrize(("architecture", "tied", "mix"), CASES)
def test_it_loads_and_follows_the_table(
    architecture: str, tied: bool, mix: str, tmp_path: Path
) -> None:
    shape = small(architecture, tied=tied)
    target = written(tmp_path / "target.gguf", shape, mix)
    draft = written(tmp_path / "draft.gguf", shape, mix, 0.5)
    with ggufspec.load(target, draft, n_threads=1, n_ctx=512) as engine:
        done = engine.generate([300], max_tokens=40, temperature=0, n_draft=2)
    assert done.finish_reason == "length"
    assert_follows([300, *done.tokens])
    assert 0.2 < done.stats.acceptance < 0.55


def assert_follows(tokens: list[int]) -> None:
    assert all(MAP[before] == after for before, after in pairwise(tokens))


@pytest.fixture(scope="module", params=[0.5, 0.8])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[float, Engine]]:
    """A target with a matrix of its own for the output, and a draft of another shape without."""
    folder = tmp_path_factory.mktemp("pair")
    target = written(folder / "target.gguf", small(), "Q3_K_S")
    shape = small(tied=True, n_layers=2, n_ff=256)
    draft = written(folder / "draft.gguf", shape, "Q4_0", request.param)
    with ggufspec.load(target, draft, n_threads=1, n_ctx=1024) as engine:
        yield request.param, engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("n_draft", [1, 3])
def test_a_draft_agrees_as_often_as_asked(
    pair: tuple[float, Engine], temperature: float, n_draft: int
) -> None:
    agreement, engine = pair
    texts = [
        engine.generate(
            [token],
            max_tokens=300,
            temperature=temperature,
            n_draft=n_draft,
            drafter="model",
            verify="rejection",
            seed=token,
        )
        for token in (400, 1400)
    ]
    drafted = [n for text in texts for n in text.stats.drafted_by_position[:1]]
    first = [n for text in texts for n in text.stats.accepted_by_position[:1]]
    assert sum(first) / sum(drafted) == pytest.approx(agreement, abs=0.02)
    accepted = sum(text.stats.n_accepted for text in texts)
    all_drafted = sum(text.stats.n_drafted for text in texts)
    expected = sum(agreement**i for i in range(1, n_draft + 1)) / n_draft
    assert accepted / all_drafted == pytest.approx(expected, abs=0.025)
    for text in texts:
        assert_follows(text.tokens)


@pytest.mark.parametrize("agreement", [0.5, 0.8])
def test_an_mtp_head_agrees_as_often_as_asked(agreement: float, tmp_path: Path) -> None:
    of = standin.source_from_dimensions("small", small("glm4moe", n_mtp_layers=1), "MXFP4_MOE")
    path = tmp_path / "model.gguf"
    standin.write(standin.plan(of, mtp_agreement=agreement), path)
    with ggufspec.load(path, "mtp", n_threads=1, n_ctx=512) as engine:
        text = engine.generate([400], max_tokens=250, temperature=0, n_draft=1, drafter="model")
    assert_follows(text.tokens)
    assert text.stats.acceptance == pytest.approx(agreement, abs=0.02)


def test_an_mtp_head_is_left_out_unless_asked_for() -> None:
    of = standin.source_from_dimensions("small", small("glm4moe", n_mtp_layers=1), "Q8_0")
    made = standin.plan(of)
    assert made.tensors == standin.source_from_dimensions("", small("glm4moe"), "Q8_0").tensors
    assert (made.values["glm4moe.block_count"], of.n_layers) == (3, 4)
    with pytest.raises(ModelError, match="no MTP head"):
        standin.plan(standin.source_from_dimensions("small", small(), "Q8_0"), mtp_agreement=0.5)
    with pytest.raises(OptionError, match="from 0 to 1"):
        standin.plan(of, mtp_agreement=1.5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "bloom", "gemma3"])
def test_a_tied_model_is_as_certain(architecture: str, tmp_path: Path) -> None:
    """The successor's logit is the planned one; the others are those of other codes."""
    path = written(tmp_path / "model.gguf", small(architecture, tied=True), "Q4_K_M")
    for tokens in ([300], [5, 900, 301]):
        logits = last_logits(path, tokens)
        assert logits.argmax() == MAP[tokens[-1]]
        assert logits.max() == pytest.approx(40, abs=1.5)
        assert np.delete(logits, logits.argmax()).std() == pytest.approx(40 / 128**0.5, rel=0.1)


def last_logits(path: Path, tokens: list[int]) -> NDArray[np.float32]:
    """(n_vocab,) after the last of the tokens."""
    llama = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    llama.eval(tokens)
    row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    logits = np.ctypeslib.as_array(row, (N_VOCAB,)).copy()
    llama.close()
    return logits


@pytest.mark.parametrize("mix", ["Q4_0", "Q3_K_M"])
def test_layers_do_not_affect_the_output(mix: str, tmp_path: Path) -> None:
    """Logits are those of the last token's code, whatever came before; all of them are finite."""
    path = written(tmp_path / "model.gguf", small(), mix)
    rows = codes(np.arange(N_VOCAB), 256).astype(np.float64)
    for tokens in ([300], [5, 900, 300], [1000, 300]):
        planned = rows @ rows[MAP[300]] * 40 / 256
        assert np.abs(last_logits(path, tokens) - planned).max() < 0.5
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        is_zero = "attn_output" in tensor.name or "ffn_down" in tensor.name
        assert values.any() != is_zero
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            assert len(np.unique(tensor.data)) > 200  # random bytes, whatever they mean


@pytest.mark.parametrize("tied", [False, True])
def test_the_file_is_what_was_planned(tied: bool, tmp_path: Path) -> None:
    shape = small(tied=tied)
    made = standin.plan(standin.source_from_dimensions("70B-like", shape, "Q4_K_M"), 0.7)
    path = tmp_path / "model.gguf"
    standin.write(made, path)
    assert path.stat().st_size == made.n_bytes
    header = read_header(path)
    types = {tensor.name: (tensor.shape, tensor.type) for tensor in made.tensors}
    assert {tensor.name: (tensor.shape, tensor.type) for tensor in header.tensors} == types
    assert (header.name, header.n_vocab) == (
        "stand-in for 70B-like: shape only, the text means nothing",
        N_VOCAB,
    )
    assert header.quantization == "Q4_K_M"
    assert header.values["ggufspec.standin.like"] == "70B-like"
    assert header.values["ggufspec.standin.agreement"] == pytest.approx(0.7)
    assert shape_of(header).is_tied == tied
    reader = gguf.GGUFReader(path)
    assert {
        each.name: (tuple(map(int, each.shape)), each.tensor_type.name) for each in reader.tensors
    } == types
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) <= made.n_tensor_bytes
    assert reader.get_field("tokenizer.ggml.model").contents() == "gpt2"


def test_one_of_a_file_has_its_tensors(tmp_path: Path) -> None:
    """Types that no mix of llama-quantize has, too: the header says which."""
    model = written(tmp_path / "model.gguf", small("qwen2", tied=True), "Q5_K_M")
    again = standin.plan(str(model))
    assert again.tensors == standin.plan(read_header(model)).tensors
    copy = tmp_path / "copy.gguf"
    standin.write(again, copy)
    ours, theirs = read_header(copy), read_header(model)
    assert ours.tensors == theirs.tensors
    of_architecture = [key for key in theirs.values if key.startswith("qwen2.")]
    assert of_architecture
    assert all(ours.values[key] == theirs.values[key] for key in of_architecture)
    with ggufspec.load(copy, model, n_threads=1, n_ctx=128) as engine:
        assert engine.generate([300], max_tokens=20, temperature=0).tokens[0] == MAP[300]


def test_words_of_a_text_are_tokens_again(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", small(n_layers=1), "Q8_0")
    with ggufspec.load(path, n_threads=1, n_ctx=256) as engine:
        tokens = engine.generate("Any text: ä, 中, 🦙.", max_tokens=12, temperature=0).tokens
        assert_follows(tokens)
        vocab = engine.vocab
        text = b"".join(vocab.piece(token) for token in tokens).decode()
        assert vocab.tokenize(text, add_special=False, parse_special=False) == list(tokens)
        any_text = "Any text: ä, 中, 🦙."
        again = vocab.tokenize(any_text, add_special=False, parse_special=False)
        assert b"".join(map(vocab.piece, again)).decode() == any_text
        assert not vocab.stop_tokens & set(MAP.tolist())


@pytest.mark.parametrize("agreement", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(agreement: float) -> None:
    with pytest.raises(OptionError, match="from 0 to 1"):
        standin.plan(standin.source_from_dimensions("small", small(), "Q4_0"), agreement)


def test_what_cannot_be_stood_in_for_is_refused() -> None:
    with pytest.raises(ModelError, match=r"IQ2_XS; supported are .*Q4_K_M"):
        standin.source_from_dimensions("small", small(), "IQ2_XS")
    with pytest.raises(ModelError, match=r"architecture mamba.*llama, qwen2"):
        standin.source_from_dimensions("small", small("mamba"), "Q4_0")
    with pytest.raises(ModelError, match="too narrow"):
        standin.plan(standin.source_from_dimensions("small", small(n_embd=32, tied=True), "Q4_0"))
    with pytest.raises(ModelError, match="at least 512"):
        standin.plan(standin.source_from_dimensions("small", small(n_vocab=300), "Q4_0"))
    with pytest.raises(ModelError, match="mixture of experts"):
        standin.plan(standin.source_from_dimensions("small", small("qwen3moe", tied=True), "Q4_0"))
    of = standin.source_from_dimensions("small", small("qwen3moe"), "Q4_0")
    routers = {"blk.0.ffn_gate_inp.weight": "Q8_0"}
    tensors = tuple(each._replace(type=routers.get(each.name, each.type)) for each in of.tensors)
    with pytest.raises(ModelError, match=r"gate_inp.weight in Q8_0.*are BF16, F16, F32$"):
        standin.plan(replace(of, tensors=tensors))


def in_a_process(code: str, path: Path) -> subprocess.Popen[bytes]:
    setup = (
        "import sys, resource, signal\n"
        "from pathlib import Path\n"
        "from ggufspec import standin\n"
        "made = standin.plan('llama-3.2-1b-instruct:Q4_K_S')\n"
        "path = Path(sys.argv[1])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", setup + code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_memory_stays_small() -> None:
    """At any size: of layers of 8 B parameters, and of its rows of 128256 tokens."""
    of = standin.source_of("llama-3.1-8b-instruct:Q4_K_S")
    layer = [tensor for tensor in of.tensors if tensor.name.startswith("blk.31.")]
    ends = [of.tensor("token_embd.weight")._replace(shape=(4096, 16384))]
    made = standin.plan(replace(of, tensors=(*ends, *layer, of.tensor("output_norm.weight"))))
    tracemalloc.start()
    n_bytes = sum(len(chunk) for chunk in made.chunks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes == made.n_bytes > 150e6
    assert peak < 60e6


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are of Unix")
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))\n"
        "from ggufspec.errors import CacheError\n"
        "try: standin.write(made, path)\n"
        "except CacheError as error: print(error)\n"
    )
    out, err = in_a_process(code, tmp_path / "model.gguf").communicate(timeout=60)
    assert not err
    assert b"cannot write model.gguf into the folder" in out
    assert b"cache" not in out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of Unix")
def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"precious")
    code = (
        "told = []\n"
        "def heard(done, of):\n"
        "    if not told: told.append(print('begun', flush=True))\n"
        "try: standin.write(made, path, force=True, progress=heard)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    process = in_a_process(code, path)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err) == (b"interrupted\n", b"")
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == b"precious"


def test_missing_space_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    made = standin.plan(standin.source_from_dimensions("small", small(), "Q4_0"))
    with pytest.raises(CacheError, match="not enough space"):
        standin.write(made, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
