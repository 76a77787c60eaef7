"""Text comes out whole: characters, stop strings and templates that span tokens."""

from __future__ import annotations

import random

import pytest

from ggufspec.engine.text import TextStream, render_chat
from ggufspec.errors import OptionError, PromptError


def feed(stream: TextStream, pieces: list[bytes]) -> str:
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        if stream.stopped:
            return text
    return text + stream.finish()


def split(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_text_is_whole_however_its_bytes_are_split() -> None:
    rng = random.Random(0)
    text = "né 🙂🙃 日本語, ﷽ end"
    for _ in range(300):
        assert feed(TextStream(), split(text.encode(), rng)) == text


def test_no_piece_ever_shows_half_a_character() -> None:
    stream = TextStream()
    shown = [stream.push(bytes([byte])) for byte in "a🙂b".encode()]
    assert shown == ["a", "", "", "", "🙂", "b"]


def test_broken_bytes_become_replacement_characters() -> None:
    assert feed(TextStream(), [b"a\xf0\x9f", b"b\xff"]) == "a\ufffdb\ufffd"


def test_an_incomplete_character_at_the_end_is_left_out() -> None:
    assert feed(TextStream(), [b"a\xf0\x9f"]) == "a"
    assert feed(TextStream(["b\n"]), [b"ab\xf0\x9f"]) == "ab"


@pytest.mark.parametrize(
    ("before", "pieces", "text"),
    [
        (b"a\xf0\x9f", [b"\x99", b"\x82", b"b"], "b"),
        ("日".encode()[1:] + b"\xe6", [b"\x97\xa5!"], "!"),
        (b"a\xe6", [b"a\x97"], "a\ufffd"),
        (b"", [b"\x97a"], "\ufffda"),
        ("日".encode(), [b"\x97a"], "\ufffda"),
    ],
)
def test_the_rest_of_a_character_of_the_prompt_is_left_out(
    before: bytes, pieces: list[bytes], text: str
) -> None:
    assert feed(TextStream(before=before), pieces) == text


def test_a_stop_string_ends_the_text_however_it_is_split() -> None:
    rng = random.Random(1)
    for _ in range(500):
        stream = TextStream(["###", "\n\nUser:"])
        assert feed(stream, split(b"Hello #1 and ## two\n\nUser: more ###", rng)) == (
            "Hello #1 and ## two"
        )
        assert stream.stopped


def test_what_might_become_a_stop_string_is_held_back_and_released() -> None:
    stream = TextStream(["STOP"])
    assert [stream.push(piece) for piece in (b"go ST", b"OR", b"E STO")] == ["go ", "STOR", "E "]
    assert stream.finish() == "STO"
    assert not stream.stopped


def test_the_first_of_several_stop_strings_wins() -> None:
    stream = TextStream(["lo wo", "lo"])
    assert stream.push(b"hello world") == "hel"


def test_overlapping_beginnings_are_not_missed() -> None:
    stream = TextStream(["aab"])
    assert feed(stream, [b"a", b"a", b"a", b"b", b"c"]) == "a"
    assert stream.stopped


def test_a_thousand_stop_strings_are_found_as_one_is() -> None:
    rng = random.Random(3)
    stops = ["".join(rng.choices("ab", k=rng.randint(9, 14))) for _ in range(1000)]
    text = "".join(rng.choices("abbb c", k=20_000))
    first = min(text.index(stop) for stop in stops if stop in text)
    stream = TextStream(stops)
    assert feed(stream, split(text.encode(), rng)) == text[:first]
    assert stream.stopped


def test_after_a_stop_nothing_more_comes() -> None:
    stream = TextStream(["."])
    assert stream.push(b"a.b") == "a"
    assert stream.push(b"c") == stream.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(OptionError, match="empty"):
        TextStream(["a", ""])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(template: str, *messages: tuple[str, str]) -> str:
    return render_chat(
        template,
        [{"role": role, "content": content} for role, content in messages],
        bos_text="<s>",
        eos_text="</s>",
    )


def test_a_template_is_rendered_up_to_the_answer() -> None:
    assert render(CHATML, ("system", "Be brief."), ("user", "Hi <b>")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_templates_have_what_the_field_gives_them() -> None:
    template = (
        "{{ bos_token }}{{ {'a': 'é'} | tojson }}{% for m in messages %}{% break %}{% endfor %}"
    )
    assert render(template, ("user", "x")) == '<s>{"a": "é"}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", ("user", "x"))) == 10
    compact = "{{ {'b': 1, 'a': 'é'} | tojson(separators=(',', ':'), ensure_ascii=True) }}"
    assert render(compact, ("user", "x")) == '{"b":1,"a":"\\u00e9"}'
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render(marked, ("assistant", "x"), ("assistant", "y")) == "xy"


@pytest.mark.parametrize("rest", [{"content": None}, {}], ids=["null", "absent"])
def test_a_call_of_a_tool_needs_no_content(rest: dict[str, None]) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], **rest}
    template = "{{ messages[0].content or '' }}{{ messages[0].tool_calls[0].function.name }}"
    assert render_chat(template, [message], bos_text="", eos_text="") == "f"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{% for %}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ undefined_thing.attribute }}",
    ],
)
def test_a_template_that_fails_says_so(template: str) -> None:
    with pytest.raises(PromptError, match="chat template"):
        render(template, ("user", "x"))


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 3}]]
)
def test_messages_are_checked(messages: list[dict[str, str]]) -> None:
    with pytest.raises(PromptError, match="message"):
        render_chat(CHATML, messages, bos_text="", eos_text="")
