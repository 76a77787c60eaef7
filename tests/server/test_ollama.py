"""Ollama's API beyond its chats: prompts, lines, and what describes the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from server.dialects import HELLO, documents_of
from serving import Live, serving

import ggufspec

GREEDY = {"temperature": 0, "num_predict": 8, "num_ctx": 4096}


def test_a_prompt_is_answered_with_or_without_the_template(live: Live) -> None:
    asked: dict[str, Any] = {"options": GREEDY, "stream": False}
    shown = live.ok("/api/generate", prompt="hello", system="Be brief.", **asked)["response"]
    turns = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert live.ok("/api/chat", messages=turns, **asked)["message"]["content"] == shown
    raw = live.ok("/api/generate", prompt="hello", raw=True, **asked)["response"]
    plain = live.ok("/v1/completions", prompt="hello", temperature=0, max_tokens=8)
    assert raw == plain["choices"][0]["text"]
    given = {"images": [], "keep_alive": "5m", "suffix": "", "options": GREEDY}  # without effect
    *lines, last = documents_of(live.post("/api/generate", prompt="hello", raw=True, **given))
    assert "".join(line["response"] for line in lines) == raw
    assert {"created_at", "eval_duration", "load_duration"} <= last.keys()
    assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"]


def test_json_is_any_object(live: Live) -> None:
    asked = {"format": "json", "raw": True, "options": {"num_predict": 2}, "stream": False}
    assert live.ok("/api/generate", prompt="hello", **asked)["response"].startswith("{")


def test_a_model_without_chat_template_continues_prompts(tmp_path: Path) -> None:
    path = tiny.write_scripted(tmp_path / "m.gguf", tiny.SPM.spell("abcdefgh"))
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        body = {"prompt": "hi", "options": {"num_predict": 3}, "stream": False}
        assert live.ok("/api/generate", **body)["response"] == "abc"
        assert live.ok("/api/show")["template"] == ""


def test_clients_load_list_and_describe_the_model(live: Live, caller: Live) -> None:
    for path in ("/api/generate", "/api/chat"):
        loaded = live.ok(path, model="x")
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    (listed,) = live.client.get("/api/tags").json()["models"]
    assert (listed["model"], listed["details"]["family"]) == ("tiny", "llama")
    (running,) = live.client.get("/api/ps").json()["models"]
    assert running.items() >= {"model": "tiny", "size": listed["size"], "size_vram": 0}.items()
    assert running["expires_at"] >= "9000", "it stays loaded"
    n_params = live.engine.pair.target.model.n_params
    assert listed["details"]["parameter_size"] == f"{n_params / 1e6:.2f}M"
    shown = live.ok("/api/show", model="x")
    assert shown["model_info"]["llama.context_length"] == live.engine.n_ctx
    assert shown["template"] == tiny.CHATML
    assert shown["capabilities"] == ["completion"]
    assert caller.ok("/api/show")["capabilities"] == ["completion", "tools", "thinking"]
    assert live.client.get("/api/version").json()["version"]
