"""Images in requests of each API, and on the page."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import tiny
import tiny_projectors
from server.pages import OpenPage, answer, send
from serving import Live, serving
from tiny_projectors import png

import ggufspec
from ggufspec.common.defaults import SERVE_BODY_IMAGES
from ggufspec.errors import PromptError
from ggufspec.server import remote_images

IMAGE = tiny_projectors.png(40, 24)
ENCODED = base64.b64encode(IMAGE).decode()
URL = f"data:image/png;base64,{ENCODED}"
GREEDY: Any = {"temperature": 0, "max_tokens": 8}

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    how: dict[str, Any] = {"vocab": tiny.BPE, "chat_template": tiny.CHATML, "n_ctx_train": 512}
    target = tiny_projectors.write_qwen2vl_model(folder / "target.gguf", **how)
    tiny_projectors.write_qwen2vl(folder / "mmproj.gguf")
    draft = tiny_projectors.write_qwen2vl_model(folder / "draft.gguf", n_layer=1, **how)
    with (
        ggufspec.load(target, draft, n_ctx=512, n_threads=1, tuned=False) as engine,
        serving(engine, n_body_bytes=SERVE_BODY_IMAGES) as running,
    ):
        yield running


def post(live: Live, path: str, **body: Any) -> Any:
    response = live.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_api_reads_the_image(seeing: Live) -> None:
    text, image = {"type": "text", "text": "what"}, {"type": "image", "data": IMAGE}
    wanted = seeing.engine.chat([{"role": "user", "content": [image, text]}], **GREEDY).text
    blind = seeing.engine.chat([{"role": "user", "content": [text]}], **GREEDY).text
    assert wanted != blind
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    chat = post(
        seeing,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [part, text]}],
        **GREEDY,
    )
    assert chat["choices"][0]["message"]["content"] == wanted
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": ENCODED},
    }
    messages = post(
        seeing, "/v1/messages", messages=[{"role": "user", "content": [block, text]}], **GREEDY
    )
    assert messages["content"][0]["text"] == wanted
    response = post(
        seeing,
        "/v1/responses",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                    {"type": "input_text", "text": "what"},
                ],
            }
        ],
        temperature=0,
        max_output_tokens=16,
    )
    assert response["output"][0]["content"][0]["text"].startswith(wanted)
    options = {"num_predict": 8, "temperature": 0}
    said = {"role": "user", "content": "what", "images": [ENCODED]}
    ollama = post(seeing, "/api/chat", messages=[said], options=options, stream=False)
    assert ollama["message"]["content"] == wanted
    generated = post(
        seeing, "/api/generate", prompt="what", images=[ENCODED], options=options, stream=False
    )
    assert generated["response"] == wanted


@pytest.mark.parametrize("more", [{"raw": True}, {"suffix": "b"}])
def test_ollama_leaves_out_no_image_silently(seeing: Live, more: dict[str, Any]) -> None:
    body = {"prompt": "a", "images": [ENCODED], "stream": False, "options": {"num_predict": 2}}
    response = seeing.client.post("/api/generate", json=body | more)
    assert response.status_code == 400
    assert "take no images" in response.json()["error"]


def test_a_completion_reads_images_at_the_marks(seeing: Live) -> None:
    mark = seeing.client.get("/props").json()["media_marker"]
    part = {"type": "image_url", "image_url": {"url": URL}}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "what"}]}]
    text = post(seeing, "/apply-template", messages=asked)["prompt"]
    assert f"user\n{mark}what" in text
    prompt = {"prompt_string": text, "multimodal_data": [ENCODED]}
    said = [{"type": "image", "data": IMAGE}, {"type": "text", "text": "what"}]
    wanted = seeing.engine.chat([{"role": "user", "content": said}], **GREEDY).text
    assert post(seeing, "/completion", prompt=prompt, **GREEDY)["content"] == wanted
    both = post(seeing, "/completion", prompt=[prompt, "hello", {"prompt_string": "a"}], **GREEDY)
    assert both[0]["content"] == wanted
    assert len(both) == 3


@pytest.mark.parametrize(
    ("text", "files", "why"),
    [
        ("a", [ENCODED], "has 0 marks <__media__>, and 'multimodal_data' 1 file;"),
        ("<__media__><__media__>a", [ENCODED], "has 2 marks"),
        ("<__media__>a", ["!"], "not valid base64"),
        ("<__media__>a", [base64.b64encode(b"text").decode()], "should be an image"),
        ("<__media__>" * 33 + "a", [ENCODED] * 33, "multimodal_data"),
    ],
)
def test_a_completion_whose_images_cannot_be_used_is_refused(
    seeing: Live, text: str, files: list[str], why: str
) -> None:
    prompt = {"prompt_string": text, "multimodal_data": files}
    response = seeing.client.post("/completion", json={"prompt": prompt})
    assert response.status_code == 400
    assert why in response.json()["error"]["message"]


def test_a_client_that_disconnects_ends_the_encoding_of_its_images(
    tmp_path: Path,
) -> None:
    how: dict[str, Any] = {"vocab": tiny.BPE, "chat_template": tiny.CHATML, "n_ctx_train": 16384}
    target = tiny_projectors.write_qwen2vl_model(tmp_path / "target.gguf", **how)
    tiny_projectors.write_qwen2vl(tmp_path / "mmproj.gguf")
    content = [{"type": "text", "text": "what"}]
    for seed in range(20):  # each takes 0.1 s
        url = "data:image/png;base64," + base64.b64encode(png(200, 200, seed)).decode()
        content.append({"type": "image_url", "image_url": {"url": url}})  # type: ignore[dict-item]
    body = {"messages": [{"role": "user", "content": [*content[1:], content[0]]}], **GREEDY}
    with (
        ggufspec.load(target, n_ctx=16384, n_threads=1, tuned=False) as engine,
        serving(engine, n_body_bytes=SERVE_BODY_IMAGES) as running,
    ):
        projector = engine.pair.target.projector
        assert projector is not None
        with pytest.raises(httpx.ReadTimeout):
            running.client.post("/v1/chat/completions", json=body, timeout=0.5)
        found = post(running, "/completion", prompt="hello", **GREEDY)
        assert found["content"]
        sleep(0.3)
        n_encoded = projector.n_encoded
        assert n_encoded < 20
        sleep(0.3)
        assert projector.n_encoded == n_encoded


def test_results_of_tools_may_have_images(seeing: Live) -> None:
    counted = []
    for content in ("seen", [{"type": "text", "text": "seen"}, {
        "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}
    }]):  # fmt: skip
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t1", "name": "see", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": content}]},
        ]  # fmt: skip
        found = post(seeing, "/v1/messages/count_tokens", messages=messages)
        counted.append(found["input_tokens"])
    assert counted[1] >= counted[0] + 15


def test_what_the_model_reads_is_told(seeing: Live) -> None:
    assert seeing.client.get("/props").json()["modalities"]["vision"] is True
    assert "vision" in seeing.client.post("/api/show", json={"model": "x"}).json()["capabilities"]


def test_an_address_is_refused_unless_the_operator_allows_it(seeing: Live) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    body = {"messages": [{"role": "user", "content": [part]}], **GREEDY}
    response = seeing.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "--allow-remote-images" in response.json()["error"]["message"]


class _Files(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        places = {"/moved": (302, b""), "/image.png": (200, IMAGE), "/huge": (200, b"")}
        if self.path == "/slow":
            for _ in range(30):
                sleep(0.1)
                try:
                    self.wfile.write(b"H")
                except OSError:
                    return
        status, data = places.get(self.path, (404, b""))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/image.png")
        if self.path == "/loop":
            self.send_header("Location", "/loop")
        self.end_headers()
        if self.path == "/huge":
            try:
                for _ in range(100):
                    self.wfile.write(bytes(2**20))
            except OSError:
                return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_private_hosts_are_not_asked(host: str) -> None:
    for url in (
        f"{host}/image.png",
        "http://localhost/a",
        "http://[::1]/a",
        "http://169.254.169.254/latest",
        "http://10.0.0.1/a",
        "http://[::ffff:127.0.0.1]/a",
        "http://[64:ff9b::7f00:1]/a",
        "http://0.0.0.0/a",
    ):
        with pytest.raises(PromptError, match="not a public one"):
            remote_images.fetched(url)
    with pytest.raises(PromptError, match="another scheme"):
        remote_images.fetched("ftp://example.org/a.png")


def test_a_public_file_is_fetched_within_limits(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_images, "is_public", lambda address: True)
    assert remote_images.fetched(f"{host}/moved") == IMAGE
    for path, why in (("missing", "status 404"), ("huge", "more than 32 MiB")):
        with pytest.raises(PromptError, match=why):
            remote_images.fetched(f"{host}/{path}")


def test_a_host_that_sends_byte_after_byte_is_left(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images, "is_public", lambda address: True)
    monkeypatch.setattr(remote_images, "_SECONDS", 0.3)
    begun = monotonic()
    with pytest.raises(PromptError, match="was not fetched"):
        remote_images.fetched(f"{host}/slow")
    assert monotonic() - begun < 1.5


def test_an_image_dropped_onto_the_page_is_sent(seeing: Live, open_page: OpenPage) -> None:
    page = open_page(seeing)
    page.fill("#temperature", "0")
    page.fill("#tokens", "8")
    page.check("#drafts")
    drop = """(data) => {
        const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
        const moved = new DataTransfer();
        moved.items.add(new File([bytes], "a.png", {type: "image/png"}));
        document.body.dispatchEvent(
            new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer: moved}));
    }"""
    page.wait_for_selector("#prompt[placeholder*='Images can be dropped']")
    page.evaluate(drop, ENCODED)
    page.wait_for_selector("#attached img")
    send(page, "what", 1)
    assert not page.locator(".alarm").all_text_contents()
    said = [{"type": "image", "data": IMAGE}, {"type": "text", "text": "what"}]
    wanted = seeing.engine.chat([{"role": "user", "content": said}], **GREEDY).text
    assert answer(page) == wanted
    assert page.locator(".exchange img").count() == 1
    assert page.locator("#attached img").count() == 0, "the next message has none"
    page.click(".again")
    page.wait_for_selector("#send:not([disabled])")
    assert answer(page) == wanted, "the image is asked about again"
    page.reload()
    page.wait_for_selector(".exchange img")
