"""Many clients, one engine: turns, limits, clients that go away, and the end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, at_most
from serving import Live, comes_true, serving

import ggufspec
from ggufspec.engine import logprobs
from ggufspec.engine.engine import Engine
from ggufspec.engine.logprobs import logprobs_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENDLESS: dict[str, Any] = {"prompt": "hi", "temperature": 0, "stream": True}
BRIEF: dict[str, Any] = {"prompt": "hi", "temperature": 0, "max_tokens": 26}


@pytest.fixture
def busy(endless: Engine) -> Iterator[Live]:
    """A server whose requests never end, and of which two may wait."""
    with serving(endless, n_waiting_max=2, keep_alive=0.05) as running:
        yield running


def begin(live: Live, stack: ExitStack, **more: Any) -> httpx.Response:
    """A stream that has begun to write, and will not end by itself."""
    made = live.client.stream("POST", "/v1/completions", json={**ENDLESS, **more})
    response = stack.enter_context(made)
    assert comes_true(lambda: live.service.texts.n_running == 1)
    return response


# Clients that go away


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_engine_within_a_round(busy: Live, stream: bool) -> None:
    if stream:
        with ExitStack() as stack:
            begin(busy, stack)
    else:
        with pytest.raises(httpx.ReadTimeout):
            busy.client.post("/v1/completions", json={**ENDLESS, "stream": False}, timeout=0.3)
    assert busy.is_free()
    assert busy.metric('generations_total{outcome="cancelled"}') == 1
    assert busy.metric("generated_tokens_total") > 0, "its tokens are counted"
    assert busy.ok("/v1/completions", **BRIEF)["choices"][0]["text"] == LETTERS


def test_a_disconnected_client_leaves_the_queue(busy: Live) -> None:
    with ExitStack() as stack:
        begin(busy, stack)
        with busy.client.stream("POST", "/v1/completions", json=ENDLESS):
            assert comes_true(lambda: busy.service.texts.n_waiting == 1)
        assert comes_true(lambda: busy.service.texts.n_waiting == 0)
        assert busy.service.texts.n_running == 1


def test_a_cancelled_prompt_is_not_processed_further(endless_file: Path) -> None:
    with (
        ggufspec.load(endless_file, n_threads=1, n_ctx=100_000, n_batch=16, tuned=False) as engine,
        serving(engine) as live,
    ):
        with pytest.raises(httpx.ReadTimeout):
            live.client.post("/v1/completions", json={"prompt": [5] * 60_000}, timeout=0.3)
        assert engine.run(lambda: engine.pair.slots[0].target.n_held)
        assert live.is_free()
        assert live.metric("generated_tokens_total") == 0
        assert live.metric("prompt_tokens_total") == 0, "it was not processed to its end"
        assert live.ok("/v1/completions", **BRIEF)["choices"][0]["text"] == LETTERS


# Time


def test_waiting_requests_get_keep_alives(busy: Live) -> None:
    with ExitStack() as stack:
        begin(busy, stack)
        waits = stack.enter_context(busy.client.stream("POST", "/v1/completions", json=ENDLESS))
        assert waits.status_code == 200
        lines = waits.iter_lines()
        signs = [line for line, _ in zip(lines, range(6), strict=False) if line]
        assert signs == [": waiting"] * len(signs)


def test_the_operators_limit_of_tokens_holds(endless: Engine) -> None:
    with serving(endless, max_tokens=5) as live:
        for more in ({}, {"max_tokens": 3}, {"max_tokens": 500}):
            body = live.ok("/v1/completions", prompt="hi", temperature=0, **more)
            wanted = min(more.get("max_tokens", 5), 5)
            assert body["choices"][0]["text"] == LETTERS[:wanted]
            assert body["choices"][0]["finish_reason"] == "length"


# Mistakes of ours


def test_an_internal_error_ends_one_request_only(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a secret prompt in /a/path")

    with monkeypatch.context() as patch:
        patch.setattr("ggufspec.engine.handle.Generation", broken)
        response = live.post("/v1/completions", **BRIEF)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "failed"
    assert "secret" not in response.text
    assert "secret" not in "".join(record.message for record in caplog.records)
    with monkeypatch.context() as patch:
        patch.setattr(live.engine.vocab, "tokenize", broken)
        response = live.post("/v1/completions", **BRIEF)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert live.post("/v1/completions", **BRIEF).status_code == 200


def test_a_decode_error_is_sent_in_the_stream(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def breaks(logits: Any, token: int, *args: Any) -> Any:
        calls.append(token)
        if len(calls) > 4:
            raise ggufspec.DecodeError("llama.cpp gave up")
        return logprobs_of(logits, token, *args)

    monkeypatch.setattr(logprobs, "logprobs_of", breaks)
    response = live.post("/v1/completions", **{**BRIEF, "stream": True, "logprobs": 0})
    assert response.status_code == 200
    assert '"message":"llama.cpp gave up"' in response.text.split("\n\n")[-2]
    assert "[DONE]" not in response.text


# The end


def test_at_shutdown_waiting_requests_fail_and_running_ones_have_time(endless: Engine) -> None:
    heard: dict[str, httpx.Response] = {}
    with serving(endless, grace=0.3) as live, ThreadPoolExecutor(2) as threads:
        first = threads.submit(live.post, "/v1/completions", **ENDLESS)
        assert comes_true(lambda: live.service.texts.n_running == 1)
        second = threads.submit(live.post, "/v1/completions", **{**ENDLESS, "stream": False})
        assert comes_true(lambda: live.service.texts.n_waiting == 1)
        live.server.should_exit = True
        heard = {"runs": first.result(PATIENCE), "waits": second.result(PATIENCE)}
    assert heard["waits"].status_code == 503
    assert heard["runs"].status_code == 200
    assert '"code":"stopping"' in heard["runs"].text.split("\n\n")[-2]


def test_while_texts_are_finished_new_requests_hear_that_it_stops(endless: Engine) -> None:
    """On new connections; and the server ends as soon as the texts do."""
    with (
        serving(endless, grace=10 * PATIENCE) as live,
        httpx.stream(
            "POST", f"{live.url}/v1/completions", json=ENDLESS, timeout=PATIENCE
        ) as response,
    ):
        events = response.iter_text()  # dropped, it would close the connection, and end the text
        next(events)
        live.server.should_exit = True
        assert comes_true(lambda: httpx.get(f"{live.url}/health").status_code == 503)
        assert httpx.get(f"{live.url}/health").json() == {"status": "stopping"}
        refused = httpx.post(f"{live.url}/v1/completions", json=ENDLESS)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "stopping"


def test_what_ends_in_time_ends_well(endless: Engine) -> None:
    with serving(endless, grace=10) as live, ThreadPoolExecutor(1) as threads:
        asked = {**BRIEF, "max_tokens": 1300}
        running = threads.submit(live.post, "/v1/completions", **asked)
        assert comes_true(lambda: live.service.texts.n_running == 1)
        live.server.should_exit = True
        assert running.result(PATIENCE).json()["choices"][0]["text"] == LETTERS * 50


# As a process


PREAMBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
COMMAND = "from ggufspec.cli.main import main; main()"


def start(*args: str | Path, preamble: str = "") -> tuple[subprocess.Popen[str], str]:
    """`ggufspec serve` on a free port, and the first line that it prints."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", PREAMBLE + preamble + COMMAND),
            *("serve", "-t", "1", "-fa", "off", "--port", "0", *map(str, args)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with at_most():
        return process, process.stdout.readline().strip()


CONNECT_WHEN_PRINTED = """
import socket, sys
class Checked:
    def __init__(self, real): self.real = real
    def write(self, text):
        if text.startswith("http://"):
            host, _, port = text.strip().removeprefix("http://").partition(":")
            try:
                socket.create_connection((host, int(port)), timeout=60).close()
            except OSError as error:
                text = f"{error}\\n"
        return self.real.write(text)
    def __getattr__(self, name): return getattr(self.real, name)
sys.stdout = Checked(sys.stdout)
"""


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_ends_the_command_gently(
    endless_file: Path, sent: signal.Signals, code: int
) -> None:
    args = ("-m", endless_file, "-c", "100000", "--grace", "0.2")
    process, url = start(*args, preamble=CONNECT_WHEN_PRINTED)
    assert url.startswith("http://127.0.0.1:"), "it is printed once the server listens"
    assert not url.endswith(":0")
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "endless"
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            text = response.iter_text()
            next(text)
            process.send_signal(sent)
            last = json.loads("".join(text).rstrip().rpartition("data: ")[2])
    assert last["error"]["code"] == "stopping"
    assert [choice["finish_reason"] for choice in last["choices"]] == ["error"]
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "nanobind" not in err  # threads may still hold objects of the extension
    assert str(endless_file.parent) not in err


def test_a_second_ctrl_c_does_not_wait(endless_file: Path) -> None:
    process, url = start("-m", endless_file, "-c", "100000", "--grace", "60")
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as response,
    ):
        text = response.iter_text()
        next(text)
        process.send_signal(signal.SIGINT)
        assert comes_true(lambda: not answers(url))
        process.send_signal(signal.SIGINT)
        assert '"code":"stopping"' in "".join(text)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "Traceback" in err) == (130, False)


STUCK = """
import time
from ggufspec.engine.passes import Passes
from ggufspec.server import uvicorn_server
uvicorn_server.AFTER_GRACE_SECONDS = 0.2
Passes.run = lambda *_: time.sleep(60)
"""


def test_a_thread_that_is_stuck_does_not_outlive_the_grace(endless_file: Path) -> None:
    process, url = start("-m", endless_file, "-c", "1000", "--grace", "0.1", preamble=STUCK)
    host, _, port = url.removeprefix("http://").partition(":")
    body = b'{"prompt": "hi"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client,
        socket.create_connection((host, int(port))) as asking,
    ):
        asking.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert comes_true(lambda: "ggufspec_queue_running 1.0" in client.get("/metrics").text)
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.splitlines()[-1] == (
        "ggufspec: the engine has not stopped within 0.5 s; ending the process"
    )


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"


def test_idle_connections_do_not_keep_others_out(endless_file: Path) -> None:
    process, url = start("-m", endless_file, "-c", "1000", preamble=FEW_FILES)
    host, _, port = url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port))))
        with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert client.post("/v1/completions", json=BRIEF).status_code == 200
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert 0 < len([line for line in err.splitlines() if "connections" in line]) < 3
    assert "Traceback" not in err


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False
