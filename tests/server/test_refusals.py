"""One table of requests that are refused: with status 400, and a message that says what to send."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server.dialects import FUNCTION, HELLO, TOOL
from serving import Live

from ggufspec.server import fields

WEATHER: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object"}}
CALLED: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
NEEDS_TEXT = "continue_final_message needs a last message of the assistant"
SCHEMA_FORM = {"type": "json_schema", "schema": {"type": "object"}}


def of(role: str, *blocks: object) -> dict[str, Any]:
    return {"role": role, "content": [*blocks] if len(blocks) > 1 else blocks[0]}


def formed(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def predicted(content: object) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/responses": {"input": "hello"},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
# By path: what is added to a good request, and how the message begins.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/completions": [
        ({"prompt": None}, "prompt is missing; send it"),
        ({"prompt": 5}, "prompt is 5; it must be a valid string or a valid list"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [10**6]}, "token 1000000"),
        ({"prompt": ["hi", ""]}, "the prompt is empty"),
        ({"prompt": [[5] * 900] * 64, "echo": True, "logprobs": 20}, "'echo' with 'logprobs' "),
        ({"temperature": "1"}, "temperature is a text; it must be a valid number"),
        ({"repetition_penalty": 1e300}, "repetition_penalty is 1e+300; that is"),
        ({"top_p": 7}, "top_p is 7; it must be less than or equal to 1"),
        (
            {"max_tokens": 3, "n_predict": 4},
            "the body: n_predict is given twice, also as max_tokens;",
        ),
        ({"stop": 0}, "stop is 0; it must be"),
        ({"stop": ["a"] * 1001}, "stop: List should have at most 1000 items"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids names token 1000000"),
        ({"logit_bias": {"999999": 1}}, "logit_bias names token 999999"),
        ({"logit_bias": [[5]]}, "logit_bias: send an object of token ids and biases, or a list"),
        ({"samplers": ["infill"]}, "the sampler 'infill' is not supported: "),
        ({"n_draft": 999}, "n_draft is 999, but this engine was loaded for at"),
        ({"draft_n": -1}, "draft_n is -1; it must be at least 1, or 'auto'"),
        ({"drafter": "../model"}, "there is no drafter '../model'"),
        ({"verify": "_lossy"}, "there is no verification rule '_lossy'"),
        ({"best_of": 5}, "best_of is 5; all choices are returned: leave it out, or send n"),
        ({"stream": 1}, "stream is 1; it must be a valid boolean"),
        ({"stream_options": {"x": 1}}, "stream_options.x: this field is unknown"),
        ({"max_tokn": 5}, "max_tokn: this field is unknown to the server, or not available here; "),
        ({"suffix": "ho"}, "this model has no tokens for the text between two others"),
        ({"prompt": [5], "suffix": "ho"}, "'suffix' needs prompts as texts"),
        ({"n_indent": -1}, "n_indent is -1; it must be greater than or equal to 0"),
        ({"guided_choice": []}, "guided_choice is empty; give at least one text"),
        ({"structured_outputs": {"json": ""}}, "the JSON schema is not JSON"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.json and structured_outputs.regex are given; give one of them",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format of type 'json_schema' has no schema; send it as json_schema: ",
        ),
        (
            {"response_format": {"type": "json_object"}, "min_tokens": 1},
            "min_tokens bans the tokens that end a text, but response_format says where it ends",
        ),
        (formed({"items": {"type": "array", "uniqueItems": True}}), "the JSON schema at #/items: "),
        (formed({"enum": ["a" * 200_000]}), "the JSON schema has 200,"),
    ],
    "/v1/chat/completions": [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [of("oracle", "hi")]}, "messages.0.role is 'oracle'; it must be 'system'"),
        ({"messages": [of("user", None)]}, "messages.0.content: only contents of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages.0.content.0: parts of type 'input_audio' are not supported",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": []}}]},
            "messages.0.function_call.arguments is a list; it must be a valid string or an object",
        ),
        ({"functions": [{"name": "f"}]}, "functions: "),
        ({"suffix": "ho"}, "suffix: is not supported in chats"),
        ({"tool_choice": "required"}, "tool_choice requires a call, but there are no 'tools'"),
        ({"tools": [TOOL], "grammar": "start: /a/"}, "'tools' can be combined with a JSON schema "),
        ({"top_logprobs": 2}, "top_logprobs needs 'logprobs': true"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has 'tools', which is a"),
        ({"continue_final_message": True}, NEEDS_TEXT),
        ({"add_generation_prompt": False}, "one of add_generation_prompt and continue_final_mess"),
        (
            {"messages": [*HELLO, *2 * [of("assistant", "a")]]},
            "the last two messages are the assistant's",
        ),
        (predicted(""), "prediction is empty"),
        (predicted("word " * 20_000), "the prediction has "),
    ],
    "/v1/messages": [
        ({"max_tokens": -1}, "max_tokens is -1; it must be greater than or equal to 0"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop is given twice"),
        (
            {
                "output_format": SCHEMA_FORM,
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_format is given twice",
        ),
        ({"thinking": {"type": "always"}}, "thinking.type is 'always'; it must be 'enabled'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "tools.0: tools of type 'web_search_20250305' are not supported",
        ),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools.0.defer_loading: is not support"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool"}},
            "tool_choice: type 'tool', and no other, needs a name",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice names 'x', but 'tools' has only weather",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages.0.content.0: blocks of type 'document' are not supported",
        ),
        (
            {"messages": [of("user", {"type": "tool_result", "tool_use_id": "1"}, CALLED)]},
            "messages.0: blocks of type 'tool_use' belong to messages of the assistant, not of the",
        ),
    ],
    "/v1/responses": [
        ({"input": [{"type": "mcp_call"}]}, "input.0: items of type 'mcp_call' are not supported"),
        ({"input": []}, "'input' is empty; send a text, or items"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input.0.message.content.0: parts of type 'input_file' are not supported",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input: item_reference names 'x'"),
        ({"previous_response_id": "resp_x"}, "there is no response 'resp_x'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0: tools of type 'web_search' are not supp"),
        (
            {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "other"}],
                },
            },
            "tool_choice.tools names a function that 'tools' does not have",
        ),
        ({"truncation": "auto"}, "truncation: is not supported with this value"),
        ({"n": 2}, "n is 2; this API has one answer: leave it out"),
    ],
    "/api/chat": [
        ({"messages": [{**HELLO[0], "images": ["x"]}]}, "this model reads no images: "),
    ],
    "/api/generate": [
        ({"options": {"mirostat": 3}}, "options.mirostat is 3; it must be less than or equal to 2"),
        ({"options": {"n_draft": 999}}, "options.n_draft is 999, but this engine"),
    ],
    "/detokenize": [({"tokens": [10**6]}, "token 1000000 does not exist; ids are 0 to ")],
}
ROWS = [(path, *row) for path, rows in REFUSED.items() for row in rows]


def message_of(response: httpx.Response) -> str:
    """The message of an error, whose form is that of the API."""
    assert response.status_code == 400, response.text
    for leaked in ("Traceback", ".py", ".gguf", "site-packages", "/tmp"):
        assert leaked not in response.text
    body = response.json()
    if response.request.url.path.startswith("/api"):
        return str(body["error"])
    kinds = {"type"} if "messages" in response.request.url.path else {"type", "param", "code"}
    assert kinds <= body["error"].keys()
    assert body["error"]["type"] == "invalid_request_error"
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("path", "more", "told"), ROWS, ids=[f"{row[0]}-{row[2][:40]}" for row in ROWS]
)
def test_what_cannot_be_done_is_refused_by_name(
    caller: Live, path: str, more: dict[str, Any], told: str
) -> None:
    assert message_of(caller.post(path, **{**GOOD[path], **more})).startswith(told)


def test_after_all_refusals_the_server_works(caller: Live) -> None:
    assert caller.post("/v1/completions", prompt="hi", max_tokens=1).status_code == 200


def test_fields_of_other_servers_are_refused_by_their_names(live: Live) -> None:
    names = [*fields.REFUSED["everywhere"], "draft.x", "\x1b[31mred"]
    for path, more in (("/v1/completions", names), ("/v1/responses", fields.REFUSED["responses"])):
        for name in more:
            error = live.post(path, **GOOD[path], **{name: 7}).json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(f"{name}: ")
    body = {"messages": [of("user", 5)]}
    error = live.post("/v1/chat/completions", **body).json()["error"]
    assert error["param"] == "messages.0.content"


def test_a_template_without_tools_or_no_template_says_so(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = message_of(live.post("/v1/chat/completions", messages=HELLO, tools=[TOOL]))
    assert told == "the chat template of this model does not support tools; leave out 'tools'"
    monkeypatch.setattr(live.engine, "chat_template", None)
    for path in ("/v1/chat/completions", "/api/chat"):
        assert "no chat template" in message_of(live.post(path, messages=HELLO))
