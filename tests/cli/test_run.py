"""`ggufspec run` writes the library's text to stdout, and what it has to say of it to stderr."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.conftest import Command

import ggufspec
from ggufspec.cli import render
from ggufspec.decoding.sampling_options import Sampling
from ggufspec.engine import fit
from ggufspec.standin import embedded

EOS = 2
PROMPT = "hi"
N_PROMPT = 3  # <s>, ▁h, i
TEXT = "héllo 🙂 wörld"
SCRIPT = tiny.SPM.spell(TEXT)
GREEDY = ("--temp", "0")


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """Answers the prompt by TEXT, and then ends."""
    return tiny.write_timed(tmp_path / "story.gguf", [*SCRIPT, EOS], n_prompt=N_PROMPT)


def refused_at(story: Path, *places: int) -> Path:
    """A draft with the target's text, except for the tokens at some places."""
    script = [*SCRIPT, EOS]
    for place in places:
        script[place] = tiny.SPM.id_of("~")
    return tiny.write_timed(story.with_name("draft.gguf"), script, n_prompt=N_PROMPT)


def library(target: Path, draft: Path | None, prompt: str, **options: Any) -> Any:
    with ggufspec.load(target, draft, n_threads=1) as engine:
        return engine.generate(prompt, **options)


def test_layers_for_a_gpu_that_is_not_there_are_answered_by_a_note(
    run: Command, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "gpus", lambda: ())
    result = run("-m", story, "-p", PROMPT, "-ngl", "99")
    assert (result.code, result.out) == (0, TEXT + "\n")
    assert result.err.startswith("ggufspec: no layers were offloaded: ")


# The text


def test_the_text_equals_the_librarys(run: Command, target: Path, draft: Path) -> None:
    # A draft length of its own: measured costs may differ between the two, beside other programs.
    options = {"temperature": 0.9, "seed": 5, "max_tokens": 80, "n_draft": 4}
    expected = library(target, draft, "hello world", **options)
    asked = ("-p", "hello world", "--temp", "0.9", "--seed", "5", "-n", "80", "--draft-n", "4")
    result = run("-m", target, "-md", draft, *asked)
    assert result.out == expected.text + "\n"
    document = run("-m", target, "-md", draft, *asked, "--json").document
    assert (document["text"], document["tokens"]) == (expected.text, list(expected.tokens))


@pytest.mark.parametrize(
    ("n_target", "n_draft", "found"),
    [
        (32, 64, ["48 tokens exceeds the 32 that", "large.gguf was trained", "use at most 32"]),
        (64, 32, ["48 tokens exceeds the 32 that", "small.gguf was trained", "drafts beyond"]),
        (48, 48, []),
    ],
)
def test_a_context_beyond_what_a_model_was_trained_for_is_reported_once(
    n_target: int, n_draft: int, found: list[str], run: Command, tmp_path: Path
) -> None:
    large = tiny.write_llama(tmp_path / "large.gguf", n_ctx_train=n_target)
    small = tiny.write_llama(tmp_path / "small.gguf", n_layer=1, n_ctx_train=n_draft)
    result = run("-m", large, "-md", small, "-p", PROMPT, "-n", "2", "-c", "48")
    assert result.code == 0
    assert result.err.count("exceeds") == bool(found)
    assert all(part in result.err for part in found)


# The prompt


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["-p", "hello world\n"], b"not read", "hello world\n"),
        ([], b"hello world\n\n", "hello world\n"),
        (["-f", "-"], b"hello\r\nworld\r\n", "hello\r\nworld"),
        (["-f", "FILE"], "\ufeff日本 🙂\n".encode(), "日本 🙂"),
    ],
)
def test_the_prompt_comes_from_where_the_user_has_it(
    args: list[str], stdin: bytes, prompt: str, run: Command, target: Path, tmp_path: Path
) -> None:
    """Without the last newline of a file, and without a byte order mark."""
    file = tmp_path / "prömpt.txt"
    file.write_bytes(stdin)
    args = [str(file) if each == "FILE" else each for each in args]
    expected = library(target, None, prompt, temperature=0, max_tokens=20)
    document = run("-m", target, *args, *GREEDY, "-n", "20", "--json", stdin=stdin).document
    assert document["tokens"] == list(expected.tokens)
    assert document["n_prompt"] == expected.stats.n_prompt


def test_chat_renders_the_targets_own_template(run: Command, tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "chat.gguf", vocab=tiny.BPE, chat_template=tiny.CHATML)
    user = {"role": "user", "content": "hello"}
    system = {"role": "system", "content": "say stop"}
    with ggufspec.load(model, n_threads=1) as engine:
        expected = [
            engine.chat(messages, temperature=0, max_tokens=20)
            for messages in ([user], [system, user])
        ]
    args = ("-m", model, "-p", "hello", *GREEDY, "-n", "20", "--json")
    alone, both, implied = (
        run(*args, *chat).document
        for chat in (["--chat"], ["--chat", "--system", "say stop"], ["--system", "say stop"])
    )
    assert alone["tokens"] == list(expected[0].tokens)
    assert both["tokens"] == implied["tokens"] == list(expected[1].tokens)
    assert run(*args).document["n_prompt"] < alone["n_prompt"] < both["n_prompt"]
    other = tmp_path / "other.jinja"
    other.write_text(tiny.CHATML.replace("<|im_start|>", "<|im_end|>"), encoding="utf-8")
    replaced = run(*args, "--chat-template-file", other).document
    assert replaced["n_prompt"] == alone["n_prompt"]
    assert replaced["tokens"] != alone["tokens"]
    text = other.read_text(encoding="utf-8")
    assert run(*args, "--chat-template", text).document["tokens"] == replaced["tokens"]
    other.write_text("{% for %}", encoding="utf-8")
    assert "chat template is not valid" in run(*args, "--chat-template-file", other).err


def test_variables_of_the_template_are_merged(run: Command, tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "plain.gguf")
    args = ("-m", model, "-p", "hello", *GREEDY, "-n", "1", "--json")
    args = (*args, "--chat-template", "{{ messages[0].content }}{{ first }}{{ second }}")
    kwargs = ("--chat-template-kwargs", '{"first": "abc", "second": "d"}')
    later = ("--chat-template-kwargs", '{"second": "defg"}')
    found = [run(*args, *more).document["n_prompt"] for more in ((), kwargs, (*kwargs, *later))]
    assert [n - found[0] for n in found] == [0, 4, 7]
    failed = run(*args, "--chat-template-kwargs", "[1]")
    assert (failed.code, "'[1]' is not a JSON object" in failed.err) == (2, True)


# Beside the text


def test_statistics_go_to_stderr_only(run: Command, story: Path) -> None:
    result = run("-m", story, "-md", refused_at(story, 1), "-p", PROMPT)
    assert result.out == TEXT + "\n"
    assert result.err.count("\n") == 1, "one line"
    for part in (f"{len(SCRIPT)} tokens at", "tokens/s", "drafted", "accepted", "prompt 3 tokens"):
        assert part in result.err


def test_compare_prints_the_speed_up_and_the_text_once(run: Command, story: Path) -> None:
    args = ("-m", story, "-md", story, "-p", PROMPT, "--compare")
    result = run(*args)
    assert result.out == TEXT + "\n"
    assert "times as fast as plain decoding" in result.err
    assert run(*args, "--json").document["speedup"] > 0
    assert run(*args[:-1], "--json").document["speedup"] is None


def test_llama_cpps_log_comes_only_when_asked_for(
    program: Command, target: Path, draft: Path
) -> None:
    args = ("run", "-t", "1", "-m", target, "-md", draft, "-p", PROMPT, "-n", "5", "--seed", "1")
    quiet, verbose = program(*args), program(*args, "-v")
    assert "llama_" not in quiet.err
    assert "llama_model_loader" in verbose.err
    assert "llama_graph_n_input_tensors" not in verbose.err, "it has no debug lines"
    assert "flash attention" not in verbose.err.partition("round 1:")[2], "it comes earlier"
    assert verbose.err.splitlines()[-1].startswith("5 tokens at")
    assert verbose.out == quiet.out


@pytest.mark.parametrize("with_draft", [False, True])
def test_the_document_is_whole_and_adds_up(
    with_draft: bool, run: Command, target: Path, draft: Path
) -> None:
    drafting = ("-md", draft, "--draft-n", "3") if with_draft else ("--drafter", "none")
    args = ("-m", target, *drafting, "-p", "hello world", "-n", "60")
    result = run(*args, "--json")
    assert (result.code, result.err) == (0, "")
    told = result.document
    assert set(told) == {
        *("text", "tokens", "finish_reason", "n_prompt", "n_generated", "n_rounds", "n_drafted"),
        *("n_accepted", "acceptance", "mean_length", "mean_depth", "drafted_by_position"),
        *("accepted_by_position", "seconds", "threads", "overhead", "tokens_per_second", "speedup"),
        *("notes", "advice", "n_expected", "n_rounds_without_draft", "n_prompt_reused"),
        *("settings", "versions"),
    }
    assert told["n_generated"] == len(told["tokens"]) == 60
    assert told["n_generated"] == told["n_accepted"] + told["n_rounds"]
    drafted, accepted = told["drafted_by_position"], told["accepted_by_position"]
    assert (sum(drafted), sum(accepted)) == (told["n_drafted"], told["n_accepted"])
    assert len(drafted) == len(accepted) == (3 if with_draft else 0)
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert sorted(accepted, reverse=True) == accepted
    assert told["mean_length"] == pytest.approx(60 / told["n_rounds"])
    assert told["acceptance"] == pytest.approx(told["n_accepted"] / max(told["n_drafted"], 1))
    seconds = told["seconds"]
    assert set(seconds) == {"prompt", "draft", "target", "verify", "other", "decode"}
    assert all(part >= 0 for part in seconds.values())
    generation = sum(seconds[part] for part in ("draft", "target", "verify", "other"))
    assert told["tokens_per_second"] == pytest.approx(60 / generation)
    assert 0 < seconds["decode"] <= seconds["draft"] + seconds["target"]
    assert told["overhead"] == pytest.approx(1 - seconds["decode"] / generation)
    assert told["settings"]["temperature"] == Sampling.temperature
    assert told["settings"]["target"] == str(target)
    assert set(told["versions"]) == {"python", "ggufspec", "llama-cpp-python", "numpy"}


# Colour


GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
COLOURED = f"{GREEN}abc{PLAIN}de{GREEN}fgh{PLAIN}i{GREEN}j{PLAIN}\n"


def test_accepted_draft_tokens_are_coloured(run: Command, tmp_path: Path) -> None:
    """The draft takes the e for another letter."""
    script = [*map(tiny.SPM.id_of, "abcdefghij"), EOS]
    wrong = [*script[:4], tiny.SPM.id_of("~"), *script[5:]]
    model, draft = (
        tiny.write_timed(tmp_path / f"{name}.gguf", tokens, n_prompt=N_PROMPT)
        for name, tokens in (("target", script), ("draft", wrong))
    )
    args = ("-m", model, "-p", PROMPT, "--draft-n", "3", "--drafter", "model", "-md", draft)
    assert run(*args, "--color", "on").out == COLOURED
    assert run(*args).out == "abcdefghij\n", "there is no terminal"
    assert "\x1b" not in run(*args, "--color", "on", "--json").out


def test_no_colour_is_put_around_nothing(run: Command, story: Path) -> None:
    result = run("-m", story, "-md", story, "-p", PROMPT, "--color", "on", "--draft-n", "1")
    assert GREEN in result.out
    assert GREEN + PLAIN not in result.out, "a draft that wrote part of a character wrote no text"


@pytest.mark.parametrize(
    ("choice", "is_terminal", "environment", "colored"),
    [
        ("auto", False, {}, False),
        ("auto", True, {}, True),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("off", True, {}, False),
        ("on", False, {"NO_COLOR": "1"}, True),
    ],
)
def test_colour_by_itself_is_for_terminals(
    choice: str,
    is_terminal: bool,
    environment: dict[str, str],
    colored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    assert render.wants_color(choice, stream) == colored


def test_the_cache_types_offered_are_those_that_there_are() -> None:
    from ggufspec.common import defaults
    from ggufspec.llama.context_options import KV_TYPES
    from ggufspec.placement.memory import VALUE_BYTES

    assert list(defaults.KV_TYPES) == list(KV_TYPES) == list(VALUE_BYTES)


@pytest.mark.parametrize("option", ["--prediction", "--draft-text"])
def test_a_known_text_makes_the_same_text_in_fewer_rounds(
    option: str, run: Command, tmp_path: Path
) -> None:
    args = ("-m", embedded.embedded_target(), "-p", PROMPT, "-n", "40", *GREEDY, "--json")
    plain = json.loads(run(*args, "--drafter", "none").out)
    predicted = tmp_path / "before.txt"
    predicted.write_text(plain["text"])
    found = json.loads(run(*args, option, predicted, "--drafter", "ngram", "--draft-n", "8").out)
    assert found["text"] == plain["text"]
    assert found["n_rounds"] < 0.6 * plain["n_rounds"]
    assert str(predicted) in json.dumps(found["settings"])


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--prediction", b"\xff\xfe\x00", "is not UTF-8"),
        ("--prediction", b"", "prediction is empty"),
        ("--draft-text", b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_a_known_text_that_is_none_is_refused(
    option: str, content: bytes, message: str, run: Command, story: Path, tmp_path: Path
) -> None:
    path = tmp_path / "before"
    path.write_bytes(content)
    result = run("-m", story, "-p", PROMPT, option, path)
    assert (result.code != 0, result.out) == (True, "")
    assert message in result.err.replace("\n", " ")
