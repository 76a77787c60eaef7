"""Files that are no model are refused by name, and models come and go without a trace."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tiny
from patience import comes_true

import ggufspec
from ggufspec.errors import ClosedError, ModelError, OptionError, VocabError
from ggufspec.llama.model import Model


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "good.gguf")


def load(target: Path, draft: Path | None = None, **how: Any) -> ggufspec.Engine:
    return ggufspec.load(target, draft, n_threads=1, **how)


def written(engine: ggufspec.Engine, n_tokens: int = 12) -> tuple[int, ...]:
    return engine.generate(
        " hello world", max_tokens=n_tokens, temperature=0, ignore_eos=True
    ).tokens


def run(program: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# Files that are no model


def starting_with(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def unknown_architecture(path: Path) -> None:
    path.write_bytes(tiny.write_llama(path).read_bytes().replace(b"llama", b"lhama"))


def cut(fraction: float) -> Callable[[Path], object]:
    return lambda path: tiny.truncate(tiny.write_llama(path), fraction)


def without_length(path: Path) -> None:
    tiny.write_llama(path, header={"context_length": None})


GARBAGE = b"GGUF" + bytes(range(256)) * 40
# What writes it, and what the message says; the quotes are of llama.cpp.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbage": (starting_with(GARBAGE), "damaged"),
    "unknown architecture": (unknown_architecture, "unknown model architecture: 'lhama'"),
    "1 %": (cut(0.01), "damaged"),
    "50 %": (cut(0.5), "damaged.*is truncated: its tensors end at byte"),
    "no length": (without_length, "key not found in model: llama.context_length"),
    "no tokenizer": (tiny.write_without_tokenizer, "damaged"),
    "missing": (lambda path: None, "there is no file .*; name the path"),
    "directory": (Path.mkdir, "is a folder; name a GGUF file"),
    "empty": (Path.touch, "is empty; a GGUF model was expected"),
    "text": (starting_with(b"Once upon a time"), "is not a GGUF file: it starts with b'Once'"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read: "),
    "embedding": (tiny.write_bert, "makes embeddings.* needs a model that writes text"),
    "encoder and decoder": (tiny.write_t5_encoder_decoder, "is an encoder .*only decodes"),
}
if hasattr(os, "mkfifo"):
    REFUSED["pipe"] = os.mkfifo, "not a regular file"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_language_model_is_refused(kind: str, good: Path, tmp_path: Path) -> None:
    write, match = REFUSED[kind]
    path = tmp_path / "bad.gguf"
    write(path)
    with pytest.raises(ModelError, match=match) as refused:
        load(path)
    message = str(refused.value)
    assert str(path) in message
    assert ("could not be loaded" in message) == ("\n  llama.cpp: " in message)
    assert len(message.splitlines()) <= 5, "a few lines are enough"
    with pytest.raises(ggufspec.GgufspecError):
        load(good, path)
    load(good).close()


@pytest.mark.parametrize(
    ("vocab", "texts", "is_refused"),
    [
        (tiny.SPM, ["same", "same"], True),
        (tiny.BPE, ["same\0a", "same\0b"], True),
        (tiny.SPM, ["\0a", "\0b"], False),
        (tiny.BPE, ["[EMPTY_41]", ""], True),
    ],
)
def test_a_duplicate_token_is_refused_where_llama_cpp_would_end_the_process(
    vocab: tiny.Vocab, texts: list[str], is_refused: bool, tmp_path: Path
) -> None:
    for i, token_text in enumerate(texts, start=40):
        vocab = vocab.with_text(i, token_text)
    path = tiny.write_llama(tmp_path / "model.gguf", vocab=vocab)
    program = f"""
        import llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        llama_cpp.llama_model_load_from_file({os.fsencode(path)!r}, params)
    """
    assert (run(program).returncode != 0) == is_refused
    if not is_refused:
        load(path).close()
        return
    for open_model in (load, ggufspec.DraftModel):
        with pytest.raises(ModelError, match="tokens 40 and 41 have the same text"):
            open_model(path)


@pytest.mark.parametrize("name", ["good.gguf/inside.gguf", "n" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_named(name: str, good: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be read|no file"):
        Model(good.parent / name)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode here")
def test_a_file_may_have_any_name(good: Path) -> None:
    load(good.rename(good.parent / os.fsdecode(b"%s a'b \xff\xfe"))).close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
def test_a_context_that_does_not_fit_is_refused(good: Path) -> None:
    # In a process of its own, with 150 MB left: a cache of two million tokens needs more.
    program = f"""
        import resource
        import ggufspec
        ggufspec.load({str(good)!r}, n_threads=1).close()
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 150 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for n_ctx in (2 * 10**6, 10**7):
            try:
                ggufspec.load({str(good)!r}, n_threads=1, n_ctx=n_ctx)
            except ggufspec.OutOfMemoryError as error:
                print(error)
        ggufspec.load({str(good)!r}, n_threads=1, n_ctx=256).close()
    """
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("use a smaller context (n_ctx, -c)") == 2
    for asked in ("2,000,000 tokens", "10,000,000 tokens", str(good), "llama.cpp: "):
        assert asked in done.stdout


def test_a_cache_type_that_does_not_fit_the_model_is_refused(good: Path) -> None:
    # Heads of 8 numbers do not fill a block of 32.
    with pytest.raises(ggufspec.GgufspecError, match=r"another cache type[^\0]*q8_0"):
        load(good, type_k="q8_0", flash_attention="on")
    load(good).close()


# Learned positions


def test_learned_positions_end_where_training_ended(tmp_path: Path) -> None:
    path = tiny.write_timed(tmp_path / "model.gguf", tiny.SPM.spell("banana "), n_ctx_train=64)
    rotary = tiny.write_llama(tmp_path / "rotary.gguf", n_ctx_train=64)
    with pytest.raises(OptionError, match=r"65 tokens is too long.* 64 positions.*\(n_ctx, -c\)"):
        load(path, n_ctx=65)
    with pytest.raises(OptionError, match=str(path)):
        load(rotary, path, n_ctx=65)
    with load(path, n_ctx=64) as engine:
        full = engine.generate([1], temperature=0)
        assert (len(full.tokens), full.finish_reason) == (63, "length")
    for pair in ((path, None), (path, rotary), (rotary, path)):
        with load(*pair) as engine:
            assert engine.n_ctx == 64


def test_other_positions_may_go_beyond_training(tmp_path: Path) -> None:
    with load(tiny.write_hybrid(tmp_path / "model.gguf", n_ctx_train=64), n_ctx=300) as engine:
        assert len(engine.generate([5] * 100, max_tokens=5, ignore_eos=True).tokens) == 5


# The progress of a load


def test_progress_says_whose_it_is(good: Path) -> None:
    heard: list[tuple[str, float]] = []
    load(good, good, progress=lambda whose, share: heard.append((whose, share))).close()
    steps = {
        whose: [share for _, share in of]
        for whose, of in itertools.groupby(heard, lambda each: each[0])
    }
    assert [*steps] == ["kernels", "target", "draft", "contexts"]
    for shares in steps.values():
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0, 1), "told before what may take long, and after it"


class StopLoadingError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "whose", "share"),
    [(StopLoadingError, "target", 0.3), (KeyboardInterrupt, "draft", 1.0)],
)
def test_an_exception_in_progress_ends_the_load(
    share: float, whose: str, error: type[BaseException], good: Path
) -> None:
    raised = error()

    def stop(name: str, done: float) -> None:
        if name == whose and done >= share:
            raise raised

    with pytest.raises(error) as caught:
        load(good, good, progress=stop)
    assert caught.value is raised
    with load(good, good) as engine:
        assert written(engine)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many models and contexts llama.cpp has made for us and not got back."""
    counts: dict[str, int] = {}

    def watch(what: str, make: str, free: str) -> None:
        counts[what] = 0
        real_make, real_free = getattr(llama_cpp, make), getattr(llama_cpp, free)

        def made(*args: Any) -> Any:
            pointer = real_make(*args)
            counts[what] += bool(pointer)
            return pointer

        def freed(pointer: Any) -> None:
            counts[what] -= 1
            real_free(pointer)

        monkeypatch.setattr(llama_cpp, make, made)
        monkeypatch.setattr(llama_cpp, free, freed)

    watch("models", "llama_model_load_from_file", "llama_model_free")
    watch("contexts", "llama_init_from_model", "llama_free")
    return counts


def test_whatever_goes_wrong_everything_is_given_back(
    held: dict[str, int], good: Path, tmp_path: Path
) -> None:
    def stop(whose: str, share: float) -> None:
        if whose == "draft" and share == 1.0:
            raise StopLoadingError

    silent = tiny.write_llama(tmp_path / "silent.gguf", vocab=tiny.SILENT)
    bert = tiny.write_bert(tmp_path / "bert.gguf")
    timed = tiny.write_timed(tmp_path / "timed.gguf", [5, 6], n_ctx_train=64)
    attempts: list[tuple[Any, type[BaseException]]] = [
        (lambda: load(good, good, progress=stop), StopLoadingError),
        (lambda: load(good, silent), VocabError),
        (lambda: load(bert), ModelError),
        (lambda: load(good, good, type_k="q8_0", flash_attention="on"), ggufspec.GgufspecError),
        (lambda: load(good, good, type_k="none"), OptionError),
        (lambda: ggufspec.DraftModel(bert, n_ctx=64), ModelError),
        (lambda: ggufspec.DraftModel(timed, n_ctx=65), OptionError),
    ]
    for attempt, error in attempts:
        with pytest.raises(error):
            attempt()
        assert not any(held.values())
    engine = load(good, good)
    assert held == {"models": 2, "contexts": 2}
    engine.close()
    engine.close()
    assert not any(held.values())


# Models that come and go


def test_a_model_tells_what_it_is(good: Path, tmp_path: Path) -> None:
    model = Model(good)
    assert model.description.startswith("llama")
    assert model.n_layers == 2
    assert model.n_ctx_train == 256
    assert 4 * model.n_params == model.n_bytes
    assert model.can_drop_tail
    assert model.chat_template is None
    model.close()
    model.close()
    with pytest.raises(ClosedError, match=r"good\.gguf is closed; load it again"):
        _ = model.pointer
    named = [
        {"name": "default", "template": "{{ 1 }}"},
        {"name": "tool_use", "template": "{{ 2 }}"},
    ]
    for given, found in (
        (tiny.CHATML, (tiny.CHATML, None)),
        (named, ("{{ 1 }}", "{{ 2 }}")),
        ("mistral-v7-tekken", (None, None)),  # so llama.cpp names a template of its own
    ):
        model = Model(tiny.write_llama(tmp_path / "chat.gguf", chat_template=given))
        assert (model.chat_template, model.chat_template_for_tools) == found
        model.close()


def test_an_engine_that_is_dropped_frees_its_models(good: Path) -> None:
    """As soon as its thread has seen it: no cycle keeps it."""
    engine = load(good, good)
    written(engine)
    engine.generate("hello", json_schema={"type": "boolean"}, max_tokens=4)
    engine.generate_batch(["hello", "hello"], max_tokens=4, n_draft="auto")
    next(engine.stream("hello", max_tokens=4))
    contexts = [engine.pair.target, engine.pair.draft]
    kept = [*contexts, *(each.model for each in contexts)]  # type: ignore[union-attr]
    gc.disable()
    try:
        del engine, contexts
        assert comes_true(lambda: all(map(is_closed, kept)), 5)
    finally:
        gc.enable()


def is_closed(owner: Any) -> bool:
    try:
        owner.pointer  # noqa: B018
    except ClosedError:
        return True
    return False


# llama.cpp's log


def test_the_log_is_silent_by_default(good: Path) -> None:
    (bad := good.parent / "bad.gguf").write_bytes(GARBAGE)
    # Not under pytest, whose handlers for logging would hide what Python's last resort prints.
    program = f"""
        import ggufspec
        with ggufspec.load({str(good)!r}, n_threads=1) as engine:
            engine.generate("hello", max_tokens=3)
        try:
            ggufspec.load({str(bad)!r})
        except ggufspec.ModelError:
            pass
    """
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_log_goes_to_a_logger(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.gguf").write_bytes(GARBAGE)
    with caplog.at_level(logging.DEBUG, "ggufspec.llama"):
        load(good).close()
        assert any("tiny-llama" in line for line in caplog.messages)
        assert all("\n" not in line and line.strip() for line in caplog.messages)
        caplog.clear()
        with pytest.raises(ModelError):
            Model(tmp_path / "bad.gguf")
    assert {record.name for record in caplog.records} == {"ggufspec.llama"}
    assert logging.ERROR in {record.levelno for record in caplog.records}


def test_other_calls_keep_their_log_afterwards(
    good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with load(good) as engine:
        ours = written(engine)
        prompt = engine.tokenize(" hello world")
        for verbose in (False, True):
            llama: Any = llama_cpp.Llama(str(good), n_ctx=256, n_threads=1, verbose=verbose)
            tokens = list(itertools.islice(llama.generate(prompt, temp=0.0), len(ours)))
            assert tuple(tokens) == ours
            llama.close()
            assert ("llama_model_loader" in capfd.readouterr().err) is verbose
        assert written(engine) == ours
        assert capfd.readouterr() == ("", "")


@pytest.fixture(autouse=True)
def as_quiet_as_before() -> Iterator[None]:
    """llama-cpp-python's verbosity is a level of its own logger; put it back."""
    logger = logging.getLogger("llama-cpp-python")
    before = logger.level
    yield
    logger.setLevel(before)
