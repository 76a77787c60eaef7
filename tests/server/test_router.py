"""Several pairs behind one address, each in a process of its own, with memory for two of three."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, comes_true

from ggufspec.server.dialects.ollama import ModelFacts
from ggufspec.server.pairs import Memory, PairPlan, Pairs
from ggufspec.server.router import make_router_app
from ggufspec.server.service import ServerOptions
from ggufspec.server.uvicorn_server import GracefulServer, bind, url_of

FACTS = ModelFacts("llama", "F32", 1000, 1000, 1024, "", [])
HI: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}


def plan(name: str, *words: object, n_bytes: int = 10**9, **more: Any) -> PairPlan:
    common = "--threads 1 --flash-attn off --cache-ram 0 --parallel 1 --alias"
    line = [*common.split(), name, *map(str, words)]
    return PairPlan(name, line, Memory(0, n_bytes), FACTS, {"max_model_len": 1024}, **more)


@dataclass(frozen=True)
class Routed:
    """A router that runs, and a client for it."""

    pairs: Pairs
    client: httpx.Client
    address: tuple[str, int]
    said: list[str]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def asked(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **{**HI, **body})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def statuses(self) -> dict[str, str]:
        listed = self.client.get("/v1/models").json()["data"]
        return {each["id"]: each["status"]["value"] for each in listed}

    def loaded(self) -> set[str]:
        return {name for name, status in self.statuses().items() if status == "loaded"}

    def have(self, *names: str) -> None:
        """Have these loaded, the first used least recently, and no others."""
        for name in self.loaded() - {*names}:
            assert self.post("/models/unload", model=name).json() == {"success": True}
        for name in names:
            self.asked(model=name)
        assert self.loaded() == {*names}


@contextmanager
def routing(folder: Path, *plans: PairPlan, **options: Any) -> Iterator[Routed]:
    """A router in a thread of this process; at the end all processes must have ended."""
    said: list[str] = []
    pairs = Pairs(
        plans,
        Memory(0, 2 * 10**9),
        n_most=0,
        keep_alive=math.inf,
        folder=folder,
        tell=lambda name, line: said.append(f"{name}: {line}"),
    )
    app = make_router_app(pairs, ServerOptions(**{"alias": "", "keep_alive": 0.05, **options}))
    server = GracefulServer(app, pairs, grace=0.2)
    listening = bind("127.0.0.1", 0)
    url, address = url_of(listening), listening.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        assert comes_true(lambda: server.started)
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            yield Routed(pairs, client, address, said)
        pids = [pair.process.pid for pair in pairs.by_name.values() if pair.process]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        pairs.close()
    assert not thread.is_alive()
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def routed(
    chat_files: tuple[Path, Path], endless_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    slots = tmp_path_factory.mktemp("slots")
    plans = (
        plan("one", "--model", chat_files[0], "--draft", chat_files[1]),
        plan(
            *("two", "--model", chat_files[1], "--slot-save-path", slots),
            slot_folder=slots,
        ),
        plan("endless", "--model", endless_file, "--ctx-size", 200_000, "--parallel", 3),
        plan("large", "--model", chat_files[1], n_bytes=2 * 10**9),
        plan("huge", "--model", endless_file, n_bytes=3 * 10**9),
        plan("broken", "--model", endless_file, "--api-key-file", "/nowhere/at/all.txt"),
    )
    with routing(tmp_path_factory.mktemp("r"), *plans) as running:
        yield running


def lines_of(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


ENDLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAI": ("/v1/completions", {"prompt": "hi", "temperature": 0}),
    "Anthropic": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10**6, "temperature": 0},
    ),
    "Ollama": ("/api/generate", {"prompt": "hi", "raw": True, "options": {"temperature": 0}}),
}


@contextmanager
def endless_text(routed: Routed, dialect: str = "OpenAI") -> Iterator[Iterator[str]]:
    """The lines of a text that has begun, and does not end by itself."""
    path, body = ENDLESS[dialect]
    sent = {**body, "model": "endless", "stream": True}
    with routed.client.stream("POST", path, json=sent) as response:
        assert response.status_code == 200
        lines = lines_of(response)
        next(line for line in lines if "text" in line or '"response":"a' in line)
        yield lines


def test_an_unknown_model_is_refused_in_each_dialect(routed: Routed) -> None:
    for path, body in ENDLESS.values():
        response = routed.post(path, **{**body, "model": "three"})
        assert response.status_code == 404
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert "there is no model 'three' here; there are one, two, endless" in message
    assert routed.client.get("/v1/models/three").status_code == 404


def test_what_cannot_fit_is_refused_with_numbers(routed: Routed) -> None:
    response = routed.post("/v1/completions", model="huge", **HI)
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "huge needs 3.0 GB of memory" in message
    assert "2.0 GB" in message


def test_paths_that_do_not_exist_load_nothing(routed: Routed) -> None:
    routed.have()
    assert routed.client.get("/favicon.ico").status_code == 404
    assert routed.client.get("/").headers["content-type"].startswith("text/html")
    assert routed.client.get("/health").json() == {"status": "ok"}
    shown = routed.post("/api/show", model="one").json()
    assert shown["model_info"]["llama.context_length"] == 1024
    assert not routed.loaded()


def test_streams_that_wait_for_a_pair_hear_of_it(routed: Routed) -> None:
    routed.have()
    texts: dict[str, str] = {}

    def ask(dialect: str) -> None:
        path, body = ENDLESS[dialect]
        short = {"max_tokens": 2} if "options" not in body else {"options": {"num_predict": 2}}
        texts[dialect] = routed.post(path, **{**body, **short, "model": "two", "stream": True}).text

    threads = [threading.Thread(target=ask, args=(dialect,)) for dialect in ENDLESS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    begins = {"OpenAI": ": {", "Anthropic": 'data: {"type":"ping",', "Ollama": '{"model":"two",'}
    ends = {"OpenAI": "data: [DONE]", "Anthropic": "message_stop", "Ollama": '"done":true'}
    for dialect, text in texts.items():
        said = next(line for line in text.splitlines() if "loading" in line)
        assert said.startswith(begins[dialect])
        assert ends[dialect] in text
    assert routed.pairs.n_loads["two"] == 1


def test_a_client_that_leaves_does_not_stop_the_load(routed: Routed) -> None:
    routed.have()
    body = b'{"model": "one", "prompt": "hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(routed.address, timeout=PATIENCE) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert comes_true(lambda: routed.statuses()["one"] == "loading")
    assert comes_true(lambda: routed.statuses()["one"] == "loaded")
    assert routed.asked(model="one")["model"] == "one"


def test_the_model_of_a_request_chooses(routed: Routed) -> None:
    routed.have("one", "two")
    assert routed.asked(model="two")["model"] == "two"
    assert routed.asked(model="two:latest")["model"] == "two"
    assert routed.asked()["model"] == "one"
    assert routed.client.get("/props", params={"model": "two"}).json()["model_alias"] == "two"
    assert routed.client.get("/v1/models/two").json()["status"]["value"] == "loaded"
    assert [each["name"] for each in routed.client.get("/api/ps").json()["models"]] == [
        "one",
        "two",
    ]


def test_errors_of_a_pair_are_passed_on(routed: Routed) -> None:
    routed.have("two")
    response = routed.post("/v1/completions", model="two", prompt="hi", nonsense=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "nonsense"
    response = routed.client.post(
        "/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert response.json()["error"]["code"] == "invalid_json"


def test_metrics_name_the_model(routed: Routed) -> None:
    routed.have("one", "two")
    text = routed.client.get("/metrics").text
    for name in ("one", "two"):
        assert f'ggufspec_generated_tokens_total{{model="{name}"}}' in text
        assert f'ggufspec_model_loads_total{{model="{name}"}}' in text
    assert '{exported_model="target",model="one",threads="1"}' in text
    assert 'ggufspec_requests_total{path="/v1/completions",status="200"}' in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len({*families})


def test_a_stored_response_is_found(routed: Routed) -> None:
    routed.have("one", "two")
    made = routed.post("/v1/responses", model="two", input="hi", max_output_tokens=16).json()
    found = routed.client.get(f"/v1/responses/{made['id']}")
    assert found.json()["id"] == made["id"]
    assert routed.client.get("/v1/responses/resp_none").status_code == 404


def test_the_least_recently_used_goes_and_never_one_with_a_text(routed: Routed) -> None:
    routed.have("endless", "one")
    with endless_text(routed) as lines:
        routed.asked(model="two")  # `endless` was used last before `one`, but writes
        assert routed.loaded() == {"endless", "two"}
        assert "text" in next(lines)
    routed.asked(model="one")
    assert routed.loaded() == {"endless", "one"}


def test_a_pair_waits_until_the_texts_of_the_others_have_ended(routed: Routed) -> None:
    routed.have("endless")
    found: list[str] = []
    order = [
        threading.Thread(target=lambda name=name: found.append(routed.asked(model=name)["model"]))
        for name in ("large", "endless")
    ]
    with endless_text(routed) as lines:
        order[0].start()
        assert comes_true(lambda: routed.statuses()["large"] == "loading")
        order[1].start()  # it waits, too: else `large` might wait for ever
        for _ in range(100):
            assert "text" in next(lines)
        assert not found
    for thread in order:
        thread.join(PATIENCE)
    assert found == ["large", "endless"]


def test_streams_whose_pair_is_killed_end_with_an_error(routed: Routed) -> None:
    routed.have("endless")
    process = routed.pairs.by_name["endless"].process
    assert process is not None
    with ExitStack() as streams:
        texts = [streams.enter_context(endless_text(routed, dialect)) for dialect in ENDLESS]
        os.kill(process.pid, signal.SIGKILL)
        lasts = [[*lines][-1] for lines in texts]
    for last in lasts:
        error = json.loads(last.removeprefix("data: "))["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith("endless has ended: ")
        assert "SIGKILL" in message
        assert "the next request starts it again" in message
    assert routed.asked(model="endless")["model"] == "endless"


def test_a_pair_that_cannot_be_loaded_is_tried_four_times(routed: Routed) -> None:
    n_said = len(routed.said)
    for _ in range(6):
        response = routed.post("/v1/completions", model="broken", **HI)
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        assert "all.txt" in message
        assert "/nowhere" not in message
    assert "4 times in a row" in message
    assert len([line for line in routed.said[n_said:] if "all.txt" in line]) == 4
    assert routed.post("/models/load", model="broken").json() == {"success": True}
    assert comes_true(lambda: routed.statuses()["broken"] == "unloaded")
    again = routed.post("/v1/completions", model="broken", **HI)
    assert "2 times in a row" in again.json()["error"]["message"]


def test_a_keep_alive_of_0_unloads_and_slots_are_kept_on_disk(routed: Routed) -> None:
    routed.have("two")
    long = "a prompt that is long enough to be worth its cells"
    routed.post("/api/generate", model="two", prompt=long, raw=True, keep_alive=0, stream=False)
    assert comes_true(lambda: routed.statuses()["two"] == "unloaded")
    found = routed.asked(model="two", prompt=f"{long} and more")
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
    said = routed.post("/api/generate", model="two", keep_alive=0).json()
    assert said["done_reason"] == "unload"
    assert routed.statuses()["two"] == "unloaded"
    wrong = routed.post("/api/generate", model="two", keep_alive="soon")
    assert wrong.status_code == 400
    assert "keep_alive" in wrong.json()["error"]
