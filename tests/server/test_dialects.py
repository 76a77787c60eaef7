"""One table of scenarios for all APIs of conversations, whole and streamed."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import tiny
from patience import held
from server.dialects import CALL, DIALECTS, HELLO, INPUT, SCHEMA, TOOL, Dialect, documents_of
from serving import Live, serving

from ggufspec.engine.engine import Engine

IN_BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@IN_BOTH_FORMS
def test_an_answer_is_that_of_the_engine(live: Live, dialect: Dialect, stream: bool) -> None:
    wanted = live.engine.chat(HELLO, temperature=0, max_tokens=8)
    live.engine.forget()
    said = dialect.ask(live, limit=8, stream=stream)
    assert (said.text, said.reasoning, said.calls) == (wanted.text, "", [])
    assert said.reason == dialect.ends.get("length", "length")
    assert (said.n_prompt, said.n_written) == (len(live.engine.render(HELLO)), 8)
    assert not said.n_reused
    # All but the last token of the prompt is in the cache by now.
    assert dialect.ask(live, limit=8).n_reused in (None, said.n_prompt - 1)


@IN_BOTH_FORMS
@pytest.mark.parametrize("n_draft", [0, 8])
def test_an_agent_gets_reasoning_text_and_calls_and_sends_back_results(
    caller: Live, dialect: Dialect, stream: bool, n_draft: int
) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "draft_n": n_draft}
    said = dialect.ask(caller, stream=stream, **asked)
    assert (said.text, said.reasoning) == ("I say", "So é")
    assert said.calls == [("weather", INPUT)] * 2
    assert said.reason == dialect.ends.get("tool_calls", "tool_calls")
    turns = [*HELLO, *dialect.answered(dialect.post(caller, **asked).json())]
    call = {"function": {"name": "weather", "arguments": INPUT}}
    rendered = [
        *HELLO,
        {
            "role": "assistant",
            "content": "I say",
            "reasoning_content": "So é",
            "tool_calls": [call, call],
        },
        *2 * [{"role": "tool", "content": "rain"}],
    ]
    if dialect.path == "/api/chat":  # its client names the reasoning otherwise
        turns[1] = {**turns[1], "reasoning_content": turns[1]["thinking"]}
    wanted = len(caller.engine.render(rendered, tools=[TOOL]))
    assert dialect.ask(caller, turns, tools=[TOOL], limit=1).n_prompt == wanted


def test_a_last_message_of_the_assistant_is_continued(live: Live, dialect: Dialect) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "world the"}]
    continues = dialect.path != "/v1/responses"  # its input is whole messages
    prompt = live.engine.render(begun, continue_final_message=continues)
    wanted = live.engine.generate(prompt, temperature=0, max_tokens=8).text
    assert dialect.ask(live, begun, limit=8).text == wanted


@IN_BOTH_FORMS
def test_json_of_a_schema_is_written(caller: Live, dialect: Dialect, stream: bool) -> None:
    said = dialect.ask(caller, schema=SCHEMA, limit=200, stream=stream)
    assert json.loads(said.text).keys() == {"city", "days"}
    assert said.reason == dialect.ends.get("stop", "stop")


def test_with_a_limit_of_0_the_prompt_is_only_cached(live: Live, dialect: Dialect) -> None:
    turns = [{"role": "user", "content": f"a prompt that only {dialect.path} has seen"}]
    names = ("prompt_tokens_total", "prompt_tokens_reused_total", "generated_tokens_total")
    found = [[live.metric(name) for name in names]]
    for _ in range(2):
        assert dialect.ask(live, turns, limit=0).text == ""
        found.append([live.metric(name) for name in names])
    (n_prompt, n_first, n_written), (_, n_second, _) = (
        [after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(found)
    )
    assert n_written == 0
    assert n_first < n_second == n_prompt - 1


@IN_BOTH_FORMS
def test_stop_strings_end_a_text_and_are_no_part_of_it(
    endless: Engine, dialect: Dialect, stream: bool
) -> None:
    with serving(endless) as live:
        assert dialect.ask(live, stop=[], limit=3).text == "abc"
        said = dialect.ask(live, stop=["", "xyz", "fg"], stream=stream)
    assert said.text == "abcde"
    wanted = "stop_sequence" if dialect.path == "/v1/messages" else dialect.ends.get("stop", "stop")
    assert said.reason == wanted


def test_a_stop_string_within_a_call_leaves_no_call_to_run(caller: Live, dialect: Dialect) -> None:
    after = dialect.ask(caller, tools=[TOOL], stop=["</tool_call>"])
    assert after.calls == [("weather", INPUT)]
    assert after.reason == dialect.ends.get("tool_calls", "tool_calls")
    inside = dialect.ask(caller, tools=[TOOL], stop=["2"])
    ((_, arguments),) = inside.calls
    assert arguments != INPUT
    wanted = {"/v1/messages": "stop_sequence", "/v1/responses": "completed"}
    assert inside.reason == wanted.get(dialect.path, "stop")
    if dialect.path == "/v1/responses":
        output = dialect.post(caller, tools=[TOOL], stop=["2"]).json()["output"]
        assert [item["status"] for item in output][-1] == "incomplete"


def test_a_stream_that_fails_ends_with_an_error(endless: Engine, dialect: Dialect) -> None:
    with serving(endless, timeout=0.3) as live:
        found = documents_of(dialect.post(live, stream=True))
        assert "--timeout" in dialect.error(found)
        assert live.is_free()
        if dialect.path == "/v1/responses":
            (item,) = found[-1]["response"]["output"]
            assert item["status"] == "incomplete"
            text = "".join(event.get("delta", "") for event in found)
            assert item["content"][0]["text"] == text != ""
        whole = dialect.post(live)
        assert whole.status_code == 504
        assert whole.headers["x-should-retry"] == "false"
        assert "--timeout" in whole.text


def test_a_stream_that_waits_says_so_and_has_its_first_events(
    endless: Engine, dialect: Dialect
) -> None:
    with (
        serving(endless, timeout=0.3, keep_alive=0.05) as live,
        held(endless),  # its thread cannot begin the text before the timeout
    ):
        response = dialect.post(live, stream=True)
    if dialect.path == "/api/chat":  # its streams have no form for a sign of life
        assert response.status_code == 504
        return
    found = documents_of(response)
    assert list(dict.fromkeys(each["type"] for each in found[:-1])) == dialect.first
    assert "--timeout" in dialect.error(found)


def test_a_prompt_beyond_the_context_is_refused_as_clients_recognise_it(
    live: Live, dialect: Dialect
) -> None:
    long = [{"role": "user", "content": "hello " * 3000}]
    for stream in (False, True):
        response = dialect.post(live, long, stream=stream, limit=5)
        assert response.status_code == 400
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        if dialect.path == "/v1/messages":
            assert message.startswith("prompt is too long: ")
            assert message.endswith(f" tokens > {live.engine.n_ctx} maximum")
        else:
            wanted = f"maximum context length is {live.engine.n_ctx} tokens. However, "
            assert wanted in message


def test_reasoning_and_places_do_not_depend_on_how_many_tokens_come_at_a_time(
    caller: Live,
) -> None:
    """Of the reasoning its number of tokens, of the content its log-probabilities."""
    text, n_wanted = f"<think>So é</think>I say\n{CALL}", len(tiny.BPE.spell("So é"))
    for n_draft in (0, 1, 8):
        asked: dict[str, Any] = {"temperature": 0, "draft_n": n_draft}
        asked["prediction"] = {"type": "content", "content": text}
        chat = caller.ok("/v1/chat/completions", messages=HELLO, tools=[TOOL], **asked)
        assert (chat["timings"]["draft_n_accepted"] > 0) == (n_draft > 0)
        details = chat["usage"]["completion_tokens_details"]
        tools = [{"type": "function", **TOOL["function"]}]
        asked["include"] = ["message.output_text.logprobs"]
        found = caller.ok("/v1/responses", input=HELLO, tools=tools, **asked)
        n_reasoning = found["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert n_reasoning == details["reasoning_tokens"] == n_wanted
        tokens = found["output"][1]["content"][0]["logprobs"]
        assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == "I say"
