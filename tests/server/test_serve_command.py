"""`ggufspec serve`: what it asks of its user before anything is loaded."""

from __future__ import annotations

import socket
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from serving import Live

from ggufspec.cli import main
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.server.routes import page
from ggufspec.server.service import ServerOptions


def called(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["ggufspec", "serve", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ggufspec.cli.serve.find_spec", lambda name: None)
    assert called(monkeypatch) == 2
    assert "pip install 'ggufspec[server]'" in capfd.readouterr().err


def test_the_options_of_the_command_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chat_files: tuple[Path, Path]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    found: list[tuple[Engine, ServerOptions]] = []

    def capture(engine: Engine, options: ServerOptions) -> None:
        found.append((engine, options))
        raise OptionError("enough")

    monkeypatch.setattr("ggufspec.server.service.make_service", capture)
    given = ["--api-key", "zero", "--api-key-file", keys, "--temp", "0.3", "--seed", "5", "-t", "1"]
    assert called(monkeypatch, "-m", chat_files[0], "--port", "0", *given) == 2
    ((engine, options),) = found
    assert options.api_keys == ("zero", "one", "two")
    assert options.defaults["temperature"] == 0.3
    assert options.defaults["seed"] == 5
    assert engine.n_ctx == 1024, "what the model was trained for"
    assert engine.n_slots == 4


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert called(monkeypatch, "-m", "/nowhere/t.gguf", "--port", str(port)) == 2
    assert f"port {port} is not available" in capfd.readouterr().err


def test_the_page_sends_no_requests_elsewhere(live: Live) -> None:
    response = live.client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.text == page().body.decode()
    library = files("ggufspec.server").joinpath("marked.min.js").read_text(encoding="utf-8")
    assert library in response.text, "the page is one file"
    ours = response.text.replace(library, "")
    assert "http://" not in ours
    assert "https://" not in ours
    assert " style=" not in response.text, "the policy would not allow it"
    assert " onclick=" not in response.text


def test_the_document_of_the_api_is_true(live: Live) -> None:
    document = live.client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        *("/v1/completions", "/v1/chat/completions", "/predict", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/props"),
        *("/tokenizer_info", "/lora-adapters", "/slots", "/slots/{id_slot}"),
        *("/completion", "/completions", "/infill", "/apply-template"),
        *("/v1/responses", "/v1/responses/{response_id}"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/chat/completions/input_tokens", "/v1/responses/input_tokens"),
        *("/api/chat", "/api/generate", "/api/tags", "/api/ps", "/api/show", "/api/version"),
    }
    for path in document["paths"].values():
        for operation in path.values():
            assert {"200", "400", "429"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
