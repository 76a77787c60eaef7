"""OpenAI's responses API: items in, items and events out, and responses that are kept."""

from __future__ import annotations

from typing import Any

from server.dialects import HELLO, TOOL, documents_of
from serving import Live

from ggufspec.server.dialects.responses_request import ResponsesRequest, ResponseStore
from ggufspec.server.errors import ApiError

FUNCTION: Any = {"type": "function", **TOOL["function"]}


def n_prompt(live: Live, **asked: Any) -> int:
    found: int = live.ok("/v1/responses", max_output_tokens=1, **asked)["usage"]["input_tokens"]
    return found


def test_a_stream_has_all_events_in_their_order(caller: Live) -> None:
    asked = {"input": HELLO, "tools": [FUNCTION], "temperature": 0, "draft_n": 0}
    kinds: list[str] = []
    for event in documents_of(caller.post("/responses", stream=True, **asked)):
        kind = event["type"].removeprefix("response.")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        *("output_item.added", *call, "output_item.done", "completed"),
    ]


def test_a_text_without_tokens_is_an_empty_message(live: Live) -> None:
    body = live.ok("/v1/responses", input="hello", stop="", grammar='start: ""')
    assert body["status"] == "completed"
    assert [part["text"] for part in body["output"][0]["content"]] == [""]


def test_items_become_the_messages_of_a_chat(forced: Live) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "More."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
            ],
        },
        *[
            {"type": "function_call", "call_id": id, "name": "weather", "arguments": '{"city": 1}'}
            for id in "ab"
        ],
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": each} for each in ("rain", "fog")],
        },
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "More."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain\nfog"},
    ]
    wanted = len(forced.engine.render(messages, tools=[TOOL]))
    asked = {"instructions": "Be brief.", "tools": [FUNCTION]}
    assert n_prompt(forced, input=items, **asked) == wanted


def test_the_functions_that_may_be_called_are_chosen(forced: Live) -> None:
    other = {**FUNCTION, "name": "other"}
    asked: dict[str, Any] = {"input": "hello", "temperature": 0, "max_output_tokens": 400}
    allowed = {"type": "allowed_tools", "mode": "required"}
    choices = (
        {"type": "function", "name": "weather"},
        {**allowed, "tools": [{"type": "function", "name": "weather"}]},
    )
    for choice in choices:
        body = forced.ok("/v1/responses", tools=[other, FUNCTION], tool_choice=choice, **asked)
        assert {item["name"] for item in body["output"]} == {"weather"}
    none = n_prompt(forced, input="hello", tools=[FUNCTION], tool_choice="none")
    assert none == n_prompt(forced, input="hello")


def test_log_probabilities_and_own_fields(forced: Live) -> None:
    body = forced.ok(
        "/v1/responses",
        input="hello",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        temperature=0,
        max_output_tokens=3,
        top_k=5,
        draft_n=0,
        report_drafted=True,
        store=False,
    )
    found = body["output"][0]["content"][0]["logprobs"]
    assert [len(each["top_logprobs"]) for each in found] == [2, 2, 2]
    assert body["ggufspec"][0]["n_drafted"] == 0
    assert forced.client.get(f"/v1/responses/{body['id']}").status_code == 404


def test_a_response_is_stored_and_continued(forced: Live) -> None:
    """With its conversation; its items may be named by their ids."""
    made = forced.ok("/v1/responses", input="hello", max_output_tokens=2, metadata={"a": "b"})
    assert (made["status"], made["metadata"]) == ("incomplete", {"a": "b"})
    path = f"/v1/responses/{made['id']}"
    assert forced.client.get(path).json()["output"] == made["output"]
    whole = [*HELLO, *made["output"], *HELLO]
    wanted = n_prompt(forced, input=whole)
    assert n_prompt(forced, input=HELLO, previous_response_id=made["id"]) == wanted
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    assert n_prompt(forced, input=[*HELLO, reference, *HELLO]) == wanted
    assert forced.client.delete(path).json()["deleted"] is True
    assert forced.client.get(path).status_code == 404


def test_a_store_drops_the_oldest() -> None:
    def ids_kept(**limits: int) -> list[bool]:
        store = ResponseStore(**limits)
        for i in range(3):
            store.add({"id": f"resp_{i}", "output": [], "text": "x" * 100}, [])
        kept = []
        for i in range(3):
            body = ResponsesRequest(input="more", previous_response_id=f"resp_{i}")
            try:
                kept.append(bool(store.items(body)))
            except ApiError:
                kept.append(False)
        return kept

    assert ids_kept() == [True, True, True]
    assert ids_kept(n_max=2) == [False, True, True]
    assert ids_kept(n_bytes_max=200) == [False, False, True]


def test_fields_without_an_effect_are_accepted(forced: Live) -> None:
    asked = {
        "truncation": "disabled",
        "background": False,
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream_options": {"include_obfuscation": False},
    }
    forced.ok("/v1/responses", input="hello", max_output_tokens=1, **asked)
