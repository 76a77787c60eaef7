"""`ggufspec chat`: a conversation, typed at a terminal or piped from a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.conftest import ERROR, INTERRUPTED, Command, InterruptedStream, is_begun
from cli.terminal import Terminal

import ggufspec

ANSWER = "Yes!"
GREEN = "\x1b[32m"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = tiny.bpe_vocab(
    control=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    )
)
END = VOCAB.id_of("<|im_end|>")
# Opens the reasoning of an answer, and leaves out that of earlier ones.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('marks in a content') }}{% endif %}"
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def answering(path: Path, text: list[int], *, template: str = tiny.CHATML, **how: Any) -> Path:
    kept = {"vocab": tiny.BPE, "n_ctx_train": 1000, **how}
    return tiny.write_scripted(path, text, chat_template=template, **kept)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def polite(folder: Path) -> Path:
    """Answers all with ANSWER."""
    end = tiny.BPE.id_of("<|im_end|>")
    return answering(folder / "polite.gguf", tiny.BPE.spell(ANSWER), then=end)


@pytest.fixture(scope="module")
def endless(folder: Path) -> Path:
    """Writes the alphabet, over and over."""
    return answering(folder / "endless.gguf", tiny.BPE.spell(LETTERS), n_ctx_train=200_000)


@pytest.fixture
def chat(command: Command, polite: Path) -> Command:
    """`ggufspec chat ...` with these lines on stdin."""

    def call(*lines: str, args: tuple[str, ...] = (), model: Path = polite) -> Any:
        stdin = "".join(f"{line}\n" for line in lines).encode()
        return command("chat", "-t", "1", "-m", model, *args, stdin=stdin)

    return call


def said(path: Path) -> list[str]:
    """The contents of a saved chat."""
    return [each["content"] for each in json.loads(path.read_text("utf-8"))["messages"]]


def prompts(err: str) -> list[tuple[int, int]]:
    """The tokens of each prompt, and how many of them were reused, from the statistics."""
    found = re.findall(r"prompt (\d+) tokens(?:, (\d+) of them reused,)? in", err)
    return [(int(n), int(reused or 0)) for n, reused in found]


# From a pipe


def test_a_loaded_chat_is_not_read_anew(chat: Command, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    first = chat("/stats", "hello " * 20, f"/save {path}")
    ((n_first, _),) = prompts(first.err)
    assert "chat.json.kv" in first.err
    later = chat(f"/load {path}", "/stats", "say")
    ((n_later, reused),) = prompts(later.err)
    assert n_later > reused >= n_first
    (tmp_path / "chat.json.kv").write_bytes(b"damaged")
    again = chat(f"/load {path}", "/stats", "say")
    assert again.code == 0
    assert again.out == later.out
    assert "the chat must be read again" in again.err
    assert prompts(again.err) == [(n_later, 0)]


def test_a_message_of_several_lines(chat: Command, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    block = ['"""', "/help  ", "", "b", '"""']
    result = chat("a\\", "b\\", "", *block, '"""one"""', "  /x", f"/save {path}", '"""no', "end")
    assert said(path)[::2] == ["a\nb\n", "/help  \n\nb", "one", "  /x"]
    assert (result.code, result.out.count(ANSWER)) == (0, 5)


def test_the_system_message(chat: Command, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = (f"/save {path}", "hello", "/system say stop", f"/save {path}.2", "/system")
    chat(*lines, f"/save {path}.3", args=("--system", "say"))
    assert said(path) == ["say"]
    assert said(Path(f"{path}.2")) == ["say stop", "hello", ANSWER]
    assert said(Path(f"{path}.3")) == ["hello", ANSWER]


def test_a_file_is_in_the_next_message_only(chat: Command, tmp_path: Path) -> None:
    path, note = tmp_path / "chat.json", tmp_path / "my note.txt"
    note.write_text("of the world", "utf-8")
    result = chat(f"/file {note}", "say", "stop", f"/save {path}", f"/file {tmp_path}")
    assert said(path)[::2] == ["my note.txt:\nof the world\n\nsay", "stop"]
    assert f"12 characters of {note}" in result.err
    assert f"the file {tmp_path} is a folder" in result.err
    assert result.code == ERROR


def test_the_last_question_and_its_answer_are_dropped(chat: Command, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = ("hello", "say", "/undo", f"/save {path}", "/undo", "/undo", f"/save {path}.2")
    result = chat(*lines, args=("--system", "be"))
    assert said(path) == ["be", "hello", ANSWER]
    assert said(Path(f"{path}.2")) == ["be"]
    assert "dropped; 1 answer left" in result.err
    assert result.err.count("there is no question to drop") == 1


def test_a_saved_chat_goes_on_with_its_options(chat: Command, tmp_path: Path) -> None:
    path, again = tmp_path / "chat.json", tmp_path / "again.json"
    changed = ("--temp", "0.5", "--top-k", "7", "-l", "5-inf", "-l", "6+2.5")
    chat("hello", f"/save {path}", args=(*changed, "--system", "be"))
    kept = {"temperature": 0.5, "top_k": 7, "logit_bias": {"5": "-inf", "6": 2.5}}
    assert json.loads(path.read_text())["sampling"] == kept
    result = chat(f"/load {path}", "say", f"/save {again}", args=("--top-k", "9"))
    assert (result.code, result.out) == (0, f"{ANSWER}\n")
    assert said(again) == ["be", "hello", ANSWER, "say", ANSWER]
    assert json.loads(again.read_text())["sampling"] == {**kept, "top_k": 9}
    biased = {"logit_bias": {tiny.BPE.id_of("z"): 99.0}}
    path.write_text(json.dumps({"messages": [], "sampling": biased}))
    result = chat("hello", "", f"/load {path}", "hello", args=("-n", "3"))
    assert (result.out, result.err.count("\n")) == (f"{ANSWER[:3]}\nzzz\n", 1)


TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"{", "not a JSON object"),
        (b"\xff\xfe", "is not UTF-8"),
        ({"messages": [*TURN, *TURN[1:]]}, "not those of user and assistant in turn"),
        ({"messages": [*TURN, *TURN[:1]]}, "its last message is not an answer"),
        ({"messages": [{"role": "user", "content": 1}, TURN[1]]}, "needs a text 'content'"),
        ({"messages": TURN, "sampling": {"heat": 1}}, "no sampling option 'heat'"),
        ({"messages": TURN, "sampling": {"temperature": -1}}, "temperature is -1"),
        ({"messages": TURN, "sampling": {"top_k": "x"}}, "top_k is 'x'"),
        ({"messages": TURN, "sampling": {"logit_bias": [1]}}, "logit_bias is [1]"),
        ({"messages": TURN, "sampling": {"logit_bias": {"99999": 1}}}, "99999"),
    ],
    ids=str,
)
def test_a_file_that_is_no_chat(document: Any, reason: str, chat: Command, tmp_path: Path) -> None:
    path, after = tmp_path / "bad.json", tmp_path / "after.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    result = chat("hello", f"/load {path}", f"/save {after}")
    assert result.code == ERROR
    (line,) = [line for line in result.err.splitlines() if line.startswith("ggufspec: ")]
    assert str(path) in line
    assert reason in line
    assert "Name a file that /save has written" in line or reason == "is not UTF-8"
    assert said(after) == ["hello", ANSWER]


def test_an_unknown_command_names_the_known_ones(chat: Command) -> None:
    result = chat("/nope", "/save", "/help", "/exit", "hello")
    assert (result.code, result.out) == (ERROR, "")
    unknown, missing, *help_ = result.err.splitlines()
    assert "there is no command /nope; there are /help, /system, /file" in unknown
    assert "'' is no path; name a file" in missing
    assert [line.split()[0] for line in help_[:9]] == re.findall(r"/\w+", unknown)[1:]


@pytest.mark.parametrize("entry", ["save ~no one/chat", "load a\0b", "file ", "save /"])
def test_a_path_that_is_none(entry: str, chat: Command) -> None:
    result = chat(f"/{entry}", "~no one", "hello")
    assert (result.code, result.out) == (ERROR, f"{ANSWER}\n{ANSWER}\n")
    (line,) = result.err.splitlines()
    assert line.startswith("ggufspec: ")


def test_with_a_shift_the_oldest_questions_are_dropped(
    chat: Command, endless: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    args = ("-c", "60", "--context-shift", "-n", "20", "--system", "be")
    result = chat("hello", "say", "stop", "world", f"/save {path}", model=endless, args=args)
    assert result.code == 0
    assert "1 question dropped, the oldest" in result.err
    contents = said(path)
    assert contents[0] == "be"
    assert "hello" not in contents
    assert contents[-2] == "world"
    assert {*contents[1::2]} <= {"say", "stop", "world"}, "questions go with their answers"
    result = chat("hello", "hello " * 99, model=endless, args=args)
    assert result.code == ERROR
    assert "the message was left out" in result.err
    result = chat("hello", model=endless, args=(*args[:3], "-n", "100"))
    assert (result.code, result.err) == (0, ""), "it is not the context that ended it"


def test_a_full_context_leaves_the_chat_alive(chat: Command, endless: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = ("hello", "say", "/undo", "/undo", "hello " * 99, "hi", f"/save {path}")
    result = chat(*lines, model=endless, args=("-c", "60"))
    assert result.code == ERROR
    notes = [line for line in result.err.splitlines() if line.startswith("ggufspec: ")]
    cut, too_long, none, long, cut_again = notes
    for line in (cut, too_long, long, cut_again):
        assert "/undo" in line
        assert "larger context (-c)" in line
    assert "the context of 60 tokens is full" in cut
    assert "the message was left out" in too_long
    assert "no question to drop" in none
    assert said(path)[0] == "hi"
    assert said(path)[1].startswith(LETTERS[:20])


def test_each_answer_has_a_seed_of_its_own(chat: Command, folder: Path, tmp_path: Path) -> None:
    """Of a model whose distribution is the same at all places."""
    model = answering(folder / "dice.gguf", [0], gap=0.0)
    path = tmp_path / "chat.json"
    args = ("-n", "12", "--ignore-eos", "--drafter", "none", "--seed")
    lines = ("hello", "/undo", "hello", "hello", f"/save {path}")
    chat(*lines, model=model, args=(*args, "5"))
    _, first, _, second = said(path)
    assert first != second
    chat("hello", f"/save {path}", model=model, args=(*args, "5"))
    assert said(path)[1] == first, "the same as after /undo"
    chat("hello", f"/save {path}", model=model, args=(*args, "6"))
    assert said(path)[1] == second


def test_v_shows_what_run_shows(
    chat: Command, polite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.llama.log.show_log", lambda: None)  # it would stay on
    result = chat("hello", "say", args=("-md", str(polite), "--draft-n", "2", "-v"))
    assert len(prompts(result.err)) == 2
    assert result.err.count("round 1: drafted 2, accepted 2") == 2
    assert result.err.count("accepted by position: ") == 2


def test_reasoning_stays_in_the_conversation(chat: Command, folder: Path, tmp_path: Path) -> None:
    script = [*VOCAB.spell("so"), VOCAB.id_of("</think>"), *VOCAB.spell("Ye!")]
    model = answering(folder / "t.gguf", script, template=THINKING, vocab=VOCAB, then=END)
    path = tmp_path / "chat.json"
    result = chat("hello", "say", f"/save {path}", model=model)
    assert result.out == "so</think>Ye!\n" * 2
    assert said(path)[1::2] == ["<think>\nso</think>Ye!"] * 2


def test_the_channels_of_an_answer_are_told_apart(
    chat: Command, folder: Path, tmp_path: Path
) -> None:
    plain = answering(folder / "p.gguf", VOCAB.spell("ab"), template=HARMONY, vocab=VOCAB)
    with ggufspec.load(plain, n_threads=1) as engine:
        n_prompt = len(engine.render([{"role": "user", "content": "hello"}]))
    marked = (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    )
    parts = re.split(r"(<\|\w+\|>)", marked)
    spelled = [[VOCAB.id_of(part)] if part[:2] == "<|" else VOCAB.spell(part) for part in parts]
    script = [*(token for each in spelled for token in each), END]
    kept = {"vocab": VOCAB, "chat_template": HARMONY, "n_ctx_train": 1000}
    model = tiny.write_timed(folder / "harmony.gguf", script, n_prompt=n_prompt, **kept)
    path = tmp_path / "chat.json"
    result = chat("hello", f"/save {path}", "say", model=model, args=("-n", "40"))
    assert result.code == 0, result.err
    answer = json.loads(path.read_text())["messages"][-1]
    assert answer == {"role": "assistant", "content": "Yes", "reasoning_content": "so"}


def test_a_template_that_has_no_system_message(chat: Command, tmp_path: Path) -> None:
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + tiny.CHATML
    )
    args = ("--chat-template-file", str(refusing))
    result = chat("hello", "/system be", "hello", args=args)
    assert (result.code, result.out) == (0, f"{ANSWER}\n{ANSWER}\n")
    assert chat("hello", args=(*args, "--system", "be")).out == f"{ANSWER}\n"


def test_ctrl_c_ends_a_script(
    chat: Command, endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.engine.engine.Stream", InterruptedStream)
    result = chat("hello", "say", model=endless, args=("--drafter", "none"))
    assert result.code == INTERRUPTED
    is_begun(result.out.removesuffix("\n"))


# At a terminal


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """`ggufspec chat ...` at a terminal that shows its first prompt, with one history."""
    opened: list[Terminal] = []

    def call(model: Path, *args: str) -> Terminal:
        cache = str(tmp_path / "cache")
        shown = Terminal(*("chat", "-t", "1", "-m", model, *args), talk=True, GGUFSPEC_CACHE=cache)
        opened.append(shown)
        assert b"> " in shown.read_until(b"> "), shown.data
        return shown

    yield call
    for shown in opened:
        shown.process.kill()
        shown.process.wait()


def interrupt(terminal: Terminal, line: str = "") -> None:
    """Ctrl-C in a line that is begun."""
    terminal.enter(line, "Ctrl-C again or Ctrl-D ends", end=CTRL_C)


def test_a_typed_conversation(
    terminal: Callable[..., Terminal], polite: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    first = terminal(polite, "-md", str(polite), "--draft-n", "2", "--temp", "0")
    assert GREEN in first.enter("hello", "!")
    assert first.press('"""\r', ". ").count(ANSWER) == 0
    first.press("of\r", ". ")
    first.enter('world"""', "!")
    first.enter(f"/save {path}", "which /load restores")
    interrupt(first, "no such question")
    first.enter(UP * 5, "!")  # the first message, from the history
    first.enter(f"/save {path}.2", "answers in")
    first.type(CTRL_D)
    code, out, _ = first.end()
    assert (code, "Traceback" in out) == (0, False)
    assert said(path)[::2] == ["hello", "of\nworld"]
    assert said(Path(f"{path}.2"))[::2] == ["hello", "of\nworld", "hello"]
    history = tmp_path / "cache" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    assert history.read_text("utf-8").split("\n")[:2] == ["hello", '"""']
    again = terminal(polite)
    again.enter(UP * 2, "!")
    again.enter(f"/save {path}.3", "which /load restores")
    assert said(Path(f"{path}.3"))[0] == "hello", "from the history of the first chat"
    interrupt(again)
    again.type(CTRL_C)
    assert again.end()[0] == 0


def test_ctrl_c_stops_an_answer_and_keeps_the_chat(
    terminal: Callable[..., Terminal], endless: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    shown = terminal(endless, "-c", "100000", "--color", "off", "--temp", "0")
    shown.press("hello\r", LETTERS)
    shown.press(CTRL_C, "> ")
    shown.enter(f"/save {path}", "1 answer in")
    hello, answer = said(path)
    assert (hello, answer[:26]) == ("hello", LETTERS)
    shown.enter("/stats", "on")
    shown.press("say\r", LETTERS)
    out = shown.press(CTRL_C, "> ")
    shown.type("/exit\r")
    code, rest, _ = shown.end()
    assert (code, "Traceback" in out + rest) == (0, False)
    assert prompts(out)[-1][1] > len(answer) // 2, "the first answer was not read anew"
