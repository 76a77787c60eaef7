"""What the tiny models promise to the other tests, and what llama.cpp says to them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import tiny

DECODERS = [
    tiny.write_llama,
    tiny.write_swa,
    tiny.write_mamba,
    tiny.write_rwkv,
    tiny.write_hybrid,
    tiny.write_qwen35,
]
PROMPT = [1, *tiny.SPM.spell(" hello world")]
Writer = Callable[..., Path]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Keeps llama.cpp's hundreds of debugging lines out of failure reports."""
    before, before_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(before_data))
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    yield
    llama_cpp.llama_log_set(before, before_data)


class Loaded:
    """A model with one context of 256 cells; `feed` decodes and hands back one row a token."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        self.model: Any = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model, f"{path.name} does not load"
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 256, 256
        params.n_threads = params.n_threads_batch = 1
        self.context: Any = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, f"{path.name} has no context"
        self.memory: Any = llama_cpp.llama_get_memory(self.context)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def submit(self, token_ids: Sequence[int], start: int = 0) -> int:
        batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
        batch.n_tokens = len(token_ids)
        for index, token_id in enumerate(token_ids):
            batch.token[index] = token_id
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        return int(status)

    def feed(self, token_ids: Sequence[int], start: int = 0) -> tiny.F32:
        assert self.submit(token_ids, start) == 0
        logits = llama_cpp.llama_get_logits(self.context)
        rows: tiny.F32 = np.ctypeslib.as_array(logits, (len(token_ids), self.n_vocab)).copy()
        return rows

    def greedy(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        token_ids = [*prompt, int(self.feed(prompt)[-1].argmax())]
        while len(token_ids) < len(prompt) + n_tokens:
            row = self.feed(token_ids[-1:], len(token_ids) - 1)[-1]
            token_ids.append(int(row.argmax()))
        return token_ids[len(prompt) :]

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        buffer = (llama_cpp.llama_token * 64)()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), buffer, 64, True, True)
        return list(buffer[:count])

    def end_of_generation(self) -> set[int]:
        return {i for i in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(self.vocab, i)}

    def drop_tail(self, start: int) -> bool:
        return bool(llama_cpp.llama_memory_seq_rm(self.memory, 0, start, -1))


@contextmanager
def loaded(path: Path) -> Iterator[Loaded]:
    model = Loaded(path)
    try:
        yield model
    finally:
        model.close()


def rows_of(path: Path, token_ids: Sequence[int]) -> tiny.F32:
    with loaded(path) as model:
        return model.feed(token_ids)


def loads(path: Path) -> bool:
    model: Any = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if model:
        llama_cpp.llama_model_free(model)
    return bool(model)


# Random models


@pytest.mark.parametrize("write", DECODERS)
def test_a_random_model_is_small_lively_and_the_same_each_time(
    write: Writer, tmp_path: Path
) -> None:
    start = time.perf_counter()
    path = write(tmp_path / "a.gguf")
    assert time.perf_counter() - start < 0.3
    assert path.stat().st_size < 2**20
    assert write(tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    with loaded(path) as model:
        written = model.greedy(PROMPT, 20)
    assert len(set(written)) > 5
    rows = rows_of(path, [*PROMPT, *written])
    assert np.isfinite(rows).all()
    assert np.array_equal(rows, rows_of(path, [*PROMPT, *written]))
    assert rows[len(PROMPT) - 1 : -1].argmax(axis=1).tolist() == written
    assert 1.5 < rows.std() < 6.0


@pytest.mark.parametrize("write", DECODERS)
def test_an_early_token_shows_in_late_logits(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    rest = tiny.SPM.spell("what the model says")
    one, other = (rows_of(path, [1, first, *rest])[-1] for first in tiny.SPM.spell("xy"))
    assert np.abs(one - other).max() > 0.05


@pytest.mark.parametrize("write", DECODERS)
def test_seeds_differ_and_noise_leaves_a_resemblance(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    with loaded(path) as model:
        text = [*PROMPT, *model.greedy(PROMPT, 120)]
    choices = rows_of(path, text).argmax(axis=1)

    def agreement(**how: Any) -> float:
        sibling = write(tmp_path / "sibling.gguf", **how)
        return float((rows_of(sibling, text).argmax(axis=1) == choices).mean())

    assert agreement(seed=1) < 0.1
    assert 0.3 < agreement(perturb=0.05) < 0.95


def test_sharpness_peaks_the_distribution(tmp_path: Path) -> None:
    flat, sharp = (
        rows_of(tiny.write_llama(tmp_path / f"{sharpness}.gguf", sharpness=sharpness), PROMPT)
        for sharpness in (1.0, 4.0)
    )
    assert sharp == pytest.approx(4.0 * flat, rel=1e-4, abs=1e-4)


def test_no_random_model_chooses_a_control_token(tmp_path: Path) -> None:
    vocab = tiny.spm_vocab(control=("<|im_end|>",)).with_size(450)
    rows = rows_of(tiny.write_llama(tmp_path / "model.gguf", vocab=vocab), PROMPT)
    silent = [0, 1, 2, vocab.id_of("<|im_end|>"), *range(390, 450)]
    assert not rows[:, silent].any()


# Memory


@pytest.mark.parametrize(
    ("write", "is_recurrent", "is_hybrid"),
    [
        (tiny.write_llama, False, False),
        (tiny.write_swa, False, False),
        (tiny.write_mamba, True, False),
        (tiny.write_rwkv, True, False),
        (tiny.write_hybrid, False, True),
        (tiny.write_qwen35, False, True),
    ],
)
def test_only_attention_can_drop_a_tail(
    write: Writer, is_recurrent: bool, is_hybrid: bool, tmp_path: Path
) -> None:
    with loaded(write(tmp_path / "model.gguf")) as model:
        assert llama_cpp.llama_model_is_recurrent(model.model) == is_recurrent
        assert llama_cpp.llama_model_is_hybrid(model.model) == is_hybrid
        model.feed(PROMPT)
        assert model.drop_tail(len(PROMPT) - 1) is not (is_recurrent or is_hybrid)
        assert model.drop_tail(0), "all can be emptied"


def test_a_sliding_window_has_its_width(tmp_path: Path) -> None:
    with loaded(tiny.write_swa(tmp_path / "model.gguf", n_window=24)) as model:
        assert llama_cpp.llama_model_n_swa(model.model) == 24


# Scripts


@pytest.mark.parametrize("vocab", [tiny.SPM, tiny.BPE], ids=["spm", "bpe"])
def test_a_scripted_model_writes_its_script_and_then_stops(
    vocab: tiny.Vocab, tmp_path: Path
) -> None:
    text = "héllo 🙂 wörld!"
    script = vocab.spell(text)
    assert len(script) > len(text), "characters are split over tokens"
    script = list(dict.fromkeys(script))  # a script without repetition
    path = tiny.write_scripted(tmp_path / "model.gguf", script, then=vocab.eos, vocab=vocab)
    prompt = [*vocab.spell("a{b}c"), vocab.id_of("~")]
    with loaded(path) as model:
        assert model.greedy(prompt, len(script) + 3) == [*script, vocab.eos, *script[:2]]
    ordered = np.sort(rows_of(path, prompt + script), axis=1)
    assert (ordered[:, -1] - ordered[:, -2]) == pytest.approx(20.0, abs=0.1)


def test_a_script_goes_round_unless_told_what_then(tmp_path: Path) -> None:
    script = tiny.SPM.spell("🙂!")
    with loaded(tiny.write_scripted(tmp_path / "model.gguf", script)) as model:
        assert tiny.SPM.text_of(model.greedy(PROMPT, 3 * len(script))) == "🙂!🙂!🙂!"
        assert model.drop_tail(0)
        assert model.greedy([*PROMPT, *script[:2]], 3) == script[2:], "goes on from the middle"


def test_a_script_cannot_fork(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two successors"):
        tiny.write_scripted(tmp_path / "model.gguf", tiny.SPM.spell("abac"))


def test_a_timed_model_repeats_tokens_and_ignores_what_it_reads(tmp_path: Path) -> None:
    script = [*tiny.SPM.spell("banana 🙂🙂"), 2]
    path = tiny.write_timed(tmp_path / "model.gguf", script, n_prompt=len(PROMPT))
    with loaded(path) as model:
        assert model.greedy(PROMPT, len(script) + 2) == [*script, *script[:2]]
        assert model.drop_tail(0)
        rows = model.feed([*PROMPT, 40, 50, 60])
    assert rows[len(PROMPT) - 1 :].argmax(axis=1).tolist() == script[:4]
    ordered = np.sort(rows, axis=1)
    assert (ordered[:, -1] - ordered[:, -2]) == pytest.approx(20.0, abs=0.1)


# Vocabularies


@pytest.mark.parametrize(("vocab", "n_bos"), [(tiny.SPM, 1), (tiny.BPE, 0)], ids=["spm", "bpe"])
def test_llama_cpp_reads_the_vocabulary_as_we_do(
    vocab: tiny.Vocab, n_bos: int, tmp_path: Path
) -> None:
    with loaded(tiny.write_llama(tmp_path / "model.gguf", vocab=vocab)) as model:
        token_ids = model.tokenize(" hello world é🙂")
        assert token_ids[:n_bos] == [vocab.bos] * n_bos
        assert vocab.text_of(token_ids[n_bos:]).strip() == "hello world é🙂"
        assert len(token_ids) < 12, "words are one token"
        buffer = ctypes.create_string_buffer(32)
        for token_id in range(len(vocab)):
            length = llama_cpp.llama_token_to_piece(model.vocab, token_id, buffer, 32, 0, False)
            assert buffer.raw[:length] == vocab.bytes_of(token_id)


def test_end_of_generation_tokens(tmp_path: Path) -> None:
    control = ("<|im_end|>", "<|eot_id|>", "<stop>")
    vocab = tiny.spm_vocab(control=control, eos="<stop>", add_bos=None)
    with loaded(tiny.write_llama(tmp_path / "model.gguf", vocab=vocab)) as model:
        wanted = {vocab.id_of(token) for token in ("</s>", *control)}
        assert model.end_of_generation() == wanted
        assert llama_cpp.llama_vocab_eos(model.vocab) == vocab.id_of("<stop>")
    with loaded(tiny.write_llama(tmp_path / "model.gguf", vocab=tiny.BPE)) as model:
        ends = {tiny.BPE.id_of(token) for token in ("<|endoftext|>", "<|im_end|>")}
        assert model.end_of_generation() == ends


def test_a_vocabulary_can_be_altered() -> None:
    assert len(tiny.SPM.with_size(400)) == 400
    assert tiny.SPM.with_size(400).tokens[-1] == "[PAD399]"
    assert tiny.SPM.with_size(300).tokens == tiny.SPM.tokens[:300]
    assert tiny.SPM.with_text(300, "other").id_of("other") == 300
    assert tiny.SPM.with_token("more").id_of("more") == len(tiny.SPM)


def test_padding_changes_no_other_logit(tmp_path: Path) -> None:
    n_vocab = len(tiny.SPM)
    padded = tiny.write_llama(tmp_path / "b.gguf", vocab=tiny.SPM.with_size(n_vocab + 64))
    rows = rows_of(tiny.write_llama(tmp_path / "a.gguf"), PROMPT)
    assert np.array_equal(rows_of(padded, PROMPT)[:, :n_vocab], rows)


def test_a_chat_template_is_carried(tmp_path: Path) -> None:
    path = tiny.write_llama(
        tmp_path / "model.gguf", vocab=tiny.BPE, chat_template=tiny.CHATML, n_embd=64
    )
    with loaded(path) as model:
        template = llama_cpp.llama_model_chat_template(model.model, None)
    assert template.decode() == tiny.CHATML


# No language model


def test_an_embedding_model_decodes_but_has_no_memory(tmp_path: Path) -> None:
    with loaded(tiny.write_bert(tmp_path / "model.gguf")) as model:
        assert not model.memory
        assert not model.feed([2, 5, 6, 3]).any(), "its logits are zeros, not an error"


def test_an_encoder_decoder_says_so(tmp_path: Path) -> None:
    with loaded(tiny.write_t5_encoder_decoder(tmp_path / "model.gguf")) as model:
        assert llama_cpp.llama_model_has_encoder(model.model)
        assert llama_cpp.llama_model_has_decoder(model.model)
        assert model.memory


@pytest.mark.parametrize("write", [tiny.write_vocab_only, tiny.write_without_tokenizer])
def test_half_a_model_is_refused(write: Writer, tmp_path: Path) -> None:
    assert not loads(write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_a_truncated_model_is_refused(fraction: float, tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    assert loads(path)
    assert not loads(tiny.truncate(path, fraction))


@pytest.mark.parametrize(
    "header", [{"embedding_length": 0}, {"attention.head_count": 0}, {"context_length": None}]
)
def test_a_header_can_be_wrong(header: tiny.Header, tmp_path: Path) -> None:
    assert not loads(tiny.write_llama(tmp_path / "model.gguf", header=header))
