"""A trimmed model computes what its source computes, with the tokens and layers that it keeps."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from small import logits, small

from ggufspec import standin
from ggufspec.errors import ModelError, OptionError
from ggufspec.llama.model import Model
from ggufspec.llama.quantize import requantize
from ggufspec.models.gguf_file import Encoded, write
from ggufspec.models.header import read_header
from ggufspec.models.quantization import header_of
from ggufspec.models.trim import required_tokens, trimmed

# Kernels differ by the number of rows, except at multiples of 32.
SPM = tiny.SPM.with_size(416)
BPE = tiny.BPE.with_size(320)
TEXT = "The model says hello,\nand 12 Käse — 世界 🎉 \t end"
WIDE = 256  # columns: the least that K-quants take


def trim(source: Path, to: Path | None = None, **kept: Any) -> Path:
    to = to or source.with_name(f"{source.stem}-trimmed.gguf")
    write(trimmed(read_header(source), **kept), to, force=True)
    return to


def ids_of(path: Path) -> list[int]:
    """For each token of a trimmed file its id in the source."""
    field = gguf.GGUFReader(path).fields["ggufspec.trim.tokens"]
    return [int(part[0]) for part in (field.parts[i] for i in field.data)]


def assert_same_logits(source: Path, copy: Path, tokens: Sequence[int]) -> None:
    """For source ids that the copy has."""
    ids = ids_of(copy)
    ours = logits(copy, [ids.index(token) for token in tokens])
    np.testing.assert_array_equal(ours, logits(source, tokens)[:, ids])


# Weights


@pytest.mark.parametrize(("quantization", "vocab"), [("Q8_0", SPM), ("Q4_K_M", BPE)])
def test_kept_tokens_have_the_logits_of_the_source(
    quantization: str, vocab: tiny.Vocab, tmp_path: Path
) -> None:
    plain = tiny.write_llama(tmp_path / "plain.gguf", n_embd=WIDE, n_ctx_train=64, vocab=vocab)
    requantize(plain, source := tmp_path / "source.gguf", quantization)
    kept = range(0, len(vocab), 3)
    copy = trim(source, tokens=kept)
    assert read_header(copy).n_vocab in range(32, len(vocab), 32)
    assert_same_logits(source, copy, [*kept[90:], *kept[1:60]][:40])


@pytest.mark.parametrize(
    ("architecture", "mix"),
    [
        ("qwen2", "Q4_0"),
        ("gemma2", "Q4_K_M"),
        ("gemma3", "Q4_K_M"),
        ("gpt2", "Q4_K_M"),
        ("qwen3moe", "Q4_K_M"),
    ],
)
def test_each_architecture_loses_tokens_and_layers_that_add_nothing(
    architecture: str, mix: str, tmp_path: Path
) -> None:
    tied = architecture not in ("gpt2", "qwen3moe")
    source = tmp_path / "source.gguf"
    shape = small(architecture, tied=tied, n_layers=5)
    standin.write(standin.plan(header_of("small", shape, mix), 0.7), source)
    copy = trim(source, tokens=range(300, 2048, 4), layers=[1, 2, 4])
    assert (read_header(copy).n_vocab < 800, read_header(copy).n_layers) == (True, 3)
    assert_same_logits(source, copy, range(300, 420, 4))


def test_the_bias_of_the_output_is_cut_too(tmp_path: Path) -> None:
    weights = tiny.Weights()
    tensors = weights.ends(SPM, 32, 3.0) | weights.llama_layers(32, 2)
    tensors["output.bias"] = np.arange(len(SPM), dtype=np.float32)
    facts = tiny.transformer(32, 2, 256)
    path = tiny.write_gguf(tmp_path / "biased.gguf", "qwen2", facts, SPM, tensors)
    assert_same_logits(path, trim(path, tokens=range(0, len(SPM), 3)), range(300, 330, 3))


# Layers


def zeroed(source: Path, layers: Sequence[int]) -> Path:
    """A copy in which these layers add nothing to the residual stream."""
    to = source.with_name("zeroed.gguf")
    to.write_bytes(source.read_bytes())
    added = ("attn_output", "ffn_down", "ssm_out")
    outputs = [f"blk.{i}.{name}.weight" for i in layers for name in added]
    header = read_header(source)
    with to.open("r+b") as file:
        for tensor in header.tensors:
            if tensor.name in outputs:
                file.seek(header.starts[tensor.name][1])
                file.write(bytes(tensor.n_bytes))
    return to


@pytest.mark.parametrize(
    ("write_source", "left_out"),
    [
        (lambda path: tiny.write_llama(path, n_layer=5, vocab=SPM), [1, 3]),
        (lambda path: tiny.write_swa(path, n_layer=6, vocab=SPM), [0, 3]),
        (lambda path: tiny.write_hybrid(path, vocab=SPM), [0]),
    ],
    ids=["llama", "gemma3", "jamba"],
)
def test_without_layers_it_computes_as_if_they_added_nothing(
    write_source: Callable[[Path], Path], left_out: list[int], tmp_path: Path
) -> None:
    source = write_source(tmp_path / "source.gguf")
    n_layers = read_header(source).n_layers
    kept = [i for i in range(n_layers) if i not in left_out]
    copy = trim(source, layers=kept)
    assert read_header(copy).n_layers == len(kept)
    assert read_header(copy).values["ggufspec.trim.layers"] == kept
    tokens = range(270, 310)  # more than the window of gemma3
    np.testing.assert_allclose(
        logits(copy, tokens), logits(zeroed(source, left_out), tokens), rtol=0, atol=1e-4
    )


def test_lists_with_a_value_for_each_layer_are_cut(tmp_path: Path) -> None:
    lists = {"feed_forward_length": [64, 64, 64], "attention.some_list": [2, 4, 2]}
    lists["rope.dimension_sections"] = [1, 2, 3]
    source = tiny.write_llama(tmp_path / "source.gguf", n_layer=3, header=lists)
    values = read_header(trim(source, layers=[0, 1])).values
    assert values["llama.feed_forward_length"] == [64, 64]
    assert values["llama.attention.some_list"] == [2, 4]
    assert values["llama.rope.dimension_sections"] == [1, 2, 3]


def test_the_window_of_each_kept_layer_stays(tmp_path: Path) -> None:
    source = tiny.write_swa(tmp_path / "source.gguf", n_layer=6)
    once = trim(source, tmp_path / "once.gguf", layers=[0, 1, 3, 4, 5])
    pattern = "gemma3.attention.sliding_window_pattern"
    assert read_header(once).values[pattern] == [True, False, False, True, False]
    twice = trim(once, tmp_path / "twice.gguf", layers=[1, 3, 4])
    assert read_header(twice).values[pattern] == [False, True, False]


# The vocabulary


@pytest.mark.parametrize("vocab", [SPM, BPE], ids=["SPM", "BPE"])
def test_a_trimmed_vocabulary_reads_any_text(vocab: tiny.Vocab, tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source.gguf", vocab=vocab)
    model = Model(trim(source, tokens=range(0, len(vocab), 1000)))
    try:
        tokens = model.vocab.tokenize(TEXT, add_special=False, parse_special=True)
        read = b"".join(map(model.vocab.piece, tokens)).decode()
    finally:
        model.close()
    assert read.removeprefix(" ") == TEXT


def test_special_tokens_get_their_new_ids(tmp_path: Path) -> None:
    vocab = tiny.bpe_vocab(eot="<|im_end|>")
    source = tiny.write_llama(tmp_path / "source.gguf", vocab=vocab, chat_template=tiny.CHATML)
    copy = read_header(trim(source, tokens=[0, 260]))
    old = read_header(source)
    for key in ("bos", "eos", "eot"):
        name = f"tokenizer.ggml.{key}_token_id"
        assert copy.tokens[copy.values[name]] == old.tokens[old.values[name]]
        assert copy.values[name] != old.values[name]
    assert copy.chat_template == tiny.CHATML
    assert copy.values["tokenizer.ggml.add_bos_token"] is False
    assert copy.values["llama.vocab_size"] == len(copy.tokens)


def test_the_tokens_that_llama_cpp_assumes_are_written_down(tmp_path: Path) -> None:
    vocab = replace(tiny.spm_vocab(), bos=None, eos=None, unk=None)
    source = tiny.write_llama(tmp_path / "source.gguf", vocab=vocab)
    values = read_header(trim(source, tokens=[300])).values
    roles = [values[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "unknown")]
    assert roles == [1, 2, 0]
    vocab = replace(tiny.bpe_vocab(), bos=None, eos=None)
    copy = read_header(trim(tiny.write_llama(source, vocab=vocab), tokens=[280]))
    assert copy.tokens[copy.values["tokenizer.ggml.bos_token_id"]] == vocab.tokens[11].encode()


def test_ids_in_lists_are_mapped(tmp_path: Path) -> None:
    header = read_header(tiny.write_llama(tmp_path / "source.gguf", vocab=BPE))
    made = trimmed(header, tokens=range(len(BPE)))
    ends, suppressed = "tokenizer.ggml.eos_token_ids", "tokenizer.ggml.suppress_tokens"
    lists = {ends: [280, 292], suppressed: [256, 289, 292]}
    write(replace(made, values={**made.values, **lists}), listed := tmp_path / "listed.gguf")
    copy = read_header(trim(listed, tmp_path / "copy.gguf", tokens=[292]))

    def texts(ids: Sequence[int]) -> list[str]:
        return [copy.tokens[i].decode() for i in ids]

    assert texts(copy.values[ends]) == [BPE.tokens[280], BPE.tokens[292]]
    assert texts(copy.values[suppressed]) == [BPE.tokens[256], BPE.tokens[292]]


def test_required_tokens_leave_out_padding(tmp_path: Path) -> None:
    vocab = tiny.spm_vocab(control=["<|x|>", "<unused7>"]).with_size(420)
    required = required_tokens(read_header(tiny.write_llama(tmp_path / "a.gguf", vocab=vocab)))
    assert required == [*range(259), vocab.id_of("▁"), vocab.id_of("<|x|>")]
    vocab = tiny.BPE.with_token("<tool>", gguf.TokenType.USER_DEFINED)
    required = required_tokens(read_header(tiny.write_llama(tmp_path / "b.gguf", vocab=vocab)))
    assert required == [*range(256), *range(290, 294)]


# The file


def test_values_keep_their_types(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    tiny.write_llama(source, vocab=BPE)
    header = read_header(source)
    made = trimmed(header, tokens=range(len(BPE)))
    kinds: dict[str, bytes] = {
        "x.uint8": struct.pack("<IB", 0, 200),
        "x.int8": struct.pack("<Ib", 1, -5),
        "x.uint16": struct.pack("<IH", 2, 65000),
        "x.bool": struct.pack("<I?", 7, True),
        "x.uint64": struct.pack("<IQ", 10, 2**60),
        "x.int64": struct.pack("<Iq", 11, -(2**60)),
        "x.float64": struct.pack("<Id", 12, 0.1),
        "x.text": struct.pack("<IQ", 8, 3) + b"\xff\xfe\x00",
        "x.int8s": struct.pack("<IIQ", 9, 1, 5000) + bytes(range(250)) * 20,
        "x.bools": struct.pack("<IIQ3?", 9, 7, 3, True, False, True),
        "x.float64s": struct.pack("<IIQ2d", 9, 12, 2, 0.1, 0.2),
        "x.none": struct.pack("<IIQ", 9, 4, 0),
    }
    values = {**made.values, **{key: Encoded(value) for key, value in kinds.items()}}
    write(replace(made, values=values), typed := tmp_path / "typed.gguf")
    copy = trim(typed, tmp_path / "copy.gguf", tokens=range(290))
    of = read_header(copy)
    data = copy.read_bytes()
    assert {key: data[slice(*of.spans[key])] for key in kinds} == kinds
    Model(copy).close()


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    whole = tiny.write_llama(tmp_path / "whole.gguf", n_layer=3, vocab=SPM)
    first = split(whole)
    copy = trim(first, tmp_path / "copy.gguf", tokens=range(320), layers=[0, 2])
    expected = trim(whole, tokens=range(320), layers=[0, 2])
    assert not [key for key in read_header(copy).values if key.startswith("split.")]
    np.testing.assert_array_equal(logits(copy, range(40)), logits(expected, range(40)))


def split(whole: Path) -> Path:
    """Divides a model into files of five tensors."""
    reader = gguf.GGUFReader(whole)
    n_files = -(-len(reader.tensors) // 5)
    header = read_header(whole)
    values = {key: Encoded(whole.read_bytes()[slice(*span)]) for key, span in header.spans.items()}
    made = trimmed(header, layers=range(header.n_layers))
    for i in range(n_files):
        part = slice(5 * i, 5 * i + 5)
        numbers = {"split.no": i, "split.count": n_files}
        numbers["split.tensors.count"] = len(header.tensors)
        write(
            replace(
                made,
                values={**values, **numbers} if i == 0 else numbers,
                tensors=made.tensors[part],
                data=lambda part=part: list(made.data())[part],
            ),
            whole.with_name(f"split-{i + 1:05}-of-{n_files:05}.gguf"),
        )
    return whole.with_name(f"split-00001-of-{n_files:05}.gguf")


def test_a_trimmed_file_says_where_it_comes_from_and_can_be_trimmed_again(tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source.gguf", n_layer=4, vocab=SPM)
    once = trim(source, tmp_path / "once.gguf", tokens=range(0, 416, 2), layers=[0, 1, 3])
    header = read_header(once)
    assert header.values["ggufspec.trim.source"] == "tiny-llama"
    assert header.values["ggufspec.trim.n_vocab"] == len(SPM)
    assert len(header.values["ggufspec.trim.source_hash"]) == 64
    assert header.name == f"tiny-llama, trimmed to {len(ids_of(once))} tokens and 3 layers"
    twice = trim(once, tmp_path / "twice.gguf", tokens=range(288), layers=[1, 2])
    at_once = trim(source, tmp_path / "direct.gguf", tokens=ids_of(twice), layers=[1, 3])
    assert twice.read_bytes() == at_once.read_bytes()
    only_layers = trim(once, tmp_path / "layers.gguf", layers=[0])
    assert ids_of(only_layers) == ids_of(once)
    assert read_header(only_layers).values["ggufspec.trim.layers"] == [0]


# Errors


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({}, "name the tokens or the layers to keep"),
        ({"tokens": []}, "list of tokens to keep is empty"),
        ({"tokens": [1, 388]}, "has no tokens 388: it has 388, numbered from 0 to 387"),
        ({"tokens": "abc"}, "must be a list of whole numbers, not 'abc'"),
        ({"layers": [True, False]}, "must be a list of whole numbers"),
        ({"layers": 3}, "must be a list of whole numbers, not 3"),
    ],
)
def test_what_cannot_be_kept(kept: dict[str, Any], message: str, tmp_path: Path) -> None:
    header = read_header(tiny.write_llama(tmp_path / "source.gguf"))
    with pytest.raises(OptionError, match=message):
        trimmed(header, **kept)


def test_tokens_may_be_an_array_in_any_order(tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source.gguf")
    copy = trim(source, tmp_path / "a.gguf", tokens=np.array([380, 300, 380]))
    assert copy.read_bytes() == trim(source, tokens=[300, 380]).read_bytes()


@pytest.mark.parametrize(
    ("write_source", "kept", "message"),
    [
        (tiny.write_without_tokenizer, {"tokens": [1]}, "has no vocabulary"),
        (tiny.write_bert, {"tokens": [1]}, "has the tokenizer bert"),
        (tiny.write_bert, {"layers": [0]}, "has the architecture bert: no layer"),
        (
            lambda path: tiny.write_llama(path, header={"nextn_predict_layers": 1}),
            {"layers": [0]},
            "nextn_predict_layers",
        ),
        (
            lambda path: tiny.write_swa(path, n_layer=62),
            {"layers": range(61)},
            "from the number of layers, 62",
        ),
        (
            lambda path: tiny.write_llama(
                path, vocab=replace(tiny.SPM, tokens=("<unk>", *map(str, range(387))))
            ),
            {"tokens": [1]},
            "has tokens for 0 of 256 bytes",
        ),
        (
            lambda path: tiny.write_llama(path, vocab=replace(tiny.SPM, scores=(0.5,) * 200)),
            {"tokens": [1]},
            "has 388 tokens, but 200 values of tokenizer.ggml.scores",
        ),
    ],
)
def test_models_that_cannot_be_trimmed(
    write_source: Callable[[Path], Path], kept: dict[str, Any], message: str, tmp_path: Path
) -> None:
    header = read_header(write_source(tmp_path / "source.gguf"))
    with pytest.raises(ModelError, match=message):
        trimmed(header, **kept)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("per_layer_token_embd.weight", (8, 388), "per_layer_token_embd.weight also has values"),
        ("d2t", (100,), "d2t also has values"),
        ("output.bias", (100,), "output.bias has 100 rows"),
    ],
)
def test_other_tensors_with_values_for_tokens_are_refused(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    header = read_header(tiny.write_llama(tmp_path / "source.gguf"))
    tensor = header.tensors[0]._replace(name=name, shape=shape, type="F32")
    with pytest.raises(ModelError, match=message):
        trimmed(replace(header, tensors=(*header.tensors, tensor)), tokens=[1])


def test_a_header_without_a_file_is_refused() -> None:
    made = header_of("small", small(), "Q4_0")
    with pytest.raises(ModelError, match="only model files can be trimmed"):
        trimmed(made, layers=[0])


def test_a_file_that_was_cut_short_meanwhile(tmp_path: Path) -> None:
    source = tiny.write_llama(tmp_path / "source.gguf")
    header = read_header(source)
    tiny.truncate(source, 0.9)
    copy = tmp_path / "copy.gguf"
    with pytest.raises(ModelError, match="is truncated, or has changed"):
        write(trimmed(header, tokens=[1]), copy)
    assert not copy.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]
