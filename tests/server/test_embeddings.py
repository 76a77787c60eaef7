"""Embeddings over HTTP are those of llama.cpp, in its own form and in OpenAI's."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import llama_cpp
import numpy as np
import pytest
import tiny
from patience import PATIENCE, comes_true
from serving import Live

from ggufspec.errors import GgufspecError, OptionError
from ggufspec.llama.embedder import POOLINGS, Embedder
from ggufspec.server.app import make_embedding_app
from ggufspec.server.embeddings import EmbeddingService
from ggufspec.server.service import ServerOptions
from ggufspec.server.uvicorn_server import GracefulServer, bind, url_of

TEXTS = ["hello world", "a", "The prince said: no!"]
WRITERS = {"bert": tiny.write_bert, "llama": tiny.write_llama, "mamba": tiny.write_mamba}


@pytest.fixture(scope="module", params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model, one that writes text, and one with a state."""
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture(scope="module", params=POOLINGS)
def client(path: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    embedder = Embedder(path, n_threads=1, pooling=request.param)
    assert embedder.pooling == request.param
    with _served(embedder) as client:
        yield client


class _served:
    """A server of embeddings in a thread of this process."""

    def __init__(self, embedder: Embedder, **options: Any) -> None:
        self.service = EmbeddingService(embedder, ServerOptions(alias="tiny", **options))
        self.server = GracefulServer(make_embedding_app(self.service), self.service, grace=0.2)
        self._listening = bind("127.0.0.1", 0)
        how: Any = {"sockets": [self._listening]}
        self._thread = threading.Thread(target=self.server.run, kwargs=how)
        url = url_of(self._listening)
        self._client = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> httpx.Client:
        self._thread.start()
        assert comes_true(lambda: self.server.started)
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.service.close()


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def reference(path: Path, pooling: str, text: str) -> np.ndarray:
    """By llama.cpp's own binding."""
    number = getattr(llama_cpp, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
    how: Any = {"embedding": True, "n_ctx": 64, "n_threads": 1, "verbose": False}
    model = llama_cpp.Llama(str(path), pooling_type=number, **how)
    try:
        return np.atleast_2d(np.array(model.embed(text, normalize=False)))
    finally:
        model.close()


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: np.ndarray = (one * other).sum(axis=1) / lengths
    return found


def test_embeddings_are_those_of_llama_cpp(
    path: Path, client: httpx.Client, request: pytest.FixtureRequest
) -> None:
    pooling = request.node.callspec.params["client"]
    found = post(client, "/embedding", content=TEXTS, embd_normalize=-1)
    assert [each["index"] for each in found] == [0, 1, 2]
    for each, text in zip(found, TEXTS, strict=True):
        rows, wanted = np.array(each["embedding"]), reference(path, pooling, text)
        assert rows.shape == wanted.shape
        assert (len(rows) == 1) == (pooling != "none")
        assert (abs(cosines(rows, wanted) - 1) < 1e-5).all()
        np.testing.assert_allclose(*(np.linalg.norm(x, axis=1) for x in (rows, wanted)), rtol=1e-3)


def test_openais_form(path: Path, client: httpx.Client, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["client"] == "none":
        error = post(client, "/v1/embeddings", 400, input="a")["error"]
        assert "--pooling mean" in error["message"]
        return
    whole = post(client, "/v1/embeddings", input=TEXTS, model="any")
    assert (whole["object"], whole["model"]) == ("list", "tiny")
    rows = np.array([each["embedding"] for each in whole["data"]])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    packed = post(client, "/v1/embeddings", input=TEXTS, encoding_format="base64")["data"]
    texts = [base64.b64decode(each["embedding"]) for each in packed]
    assert [np.frombuffer(text, "<f4").tolist() for text in texts] == rows.tolist()
    one = post(client, "/v1/embeddings", input=TEXTS[0])
    np.testing.assert_allclose(one["data"][0]["embedding"], rows[0], atol=1e-6)
    n_tokens = one["usage"]["prompt_tokens"]
    assert 1 < n_tokens < whole["usage"]["total_tokens"]
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/health").json() == {"status": "ok"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tiny.write_bert(tmp_path_factory.mktemp("models") / "bert.gguf")
    embedder = Embedder(path, n_threads=1)
    assert embedder.pooling == "mean"  # as the file says
    with _served(embedder) as client:
        yield client


def test_ids_are_taken_as_they_are(bert: httpx.Client) -> None:
    text = post(bert, "/embeddings", input="a b")[0]["embedding"]
    vocab = tiny.wordpiece_vocab()
    ids = [vocab.id_of(name) for name in ("[CLS]", "▁a", "▁b", "[SEP]")]
    assert post(bert, "/embeddings", input=ids)[0]["embedding"] == text
    two = post(bert, "/embeddings", input=[ids, ids[:2]])
    assert two[0]["embedding"] == text != two[1]["embedding"]


@pytest.mark.parametrize("norm", [-1, 0, 1, 2, 3])
def test_norms_are_llama_cpps(bert: httpx.Client, norm: int) -> None:
    raw = np.array(post(bert, "/embedding", content="a", embd_normalize=-1)[0]["embedding"][0])
    found = np.array(post(bert, "/embedding", content="a", embd_normalize=norm)[0]["embedding"][0])
    lengths = {-1: 1, 0: abs(raw).max() / 32760, 1: abs(raw).sum(), 2: np.linalg.norm(raw)}
    wanted = raw / lengths.get(norm, (abs(raw) ** 3).sum() ** (1 / 3))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_inputs_may_be_mixtures_and_objects(bert: httpx.Client) -> None:
    def ask(given: object) -> list[Any]:
        return [each["embedding"] for each in post(bert, "/v1/embeddings", input=given)["data"]]

    first, second = ask(["hello world", "a"])
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    assert ask([{"prompt_string": "hello world"}, {"content": parts}]) == [first, first]
    assert ask({"prompt_string": "a"}) == [second]
    ids = post(bert, "/v1/embeddings", input=[5, 6])["data"][0]["embedding"]
    assert ask([[5, 6], "a"]) == [ids, second]
    assert len(ask(["hello", 5])) == 1, "texts beside token ids are one input"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "2 tokens|empty|input"),
        ({"input": []}, "input"),
        ({"input": [100_000]}, "token 100000"),
        ({"input": "a " * 100}, "maximum context length is 64"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "content": "b"}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": {"content": [{"type": "image_url", "image_url": {"url": "a"}}]}}, "input"),
        ({"input": [["a", 5], {"prompt_string": 5.5}]}, "input"),
        ({}, "input"),
    ],
)
def test_wrong_inputs_are_refused_by_name(
    bert: httpx.Client, body: dict[str, Any], message: str
) -> None:
    if body == {"input": ""}:  # its marks are tokens
        assert post(bert, "/v1/embeddings", **body)["usage"]["prompt_tokens"] == 2
        return
    assert message in post(bert, "/v1/embeddings", 400, **body)["error"]["message"]


def test_a_server_of_texts_and_one_of_embeddings_say_what_to_do(
    live: Live, bert: httpx.Client
) -> None:
    for path in ("/embedding", "/embeddings", "/v1/embeddings"):
        response = live.post(path, input="a")
        assert (response.status_code, response.headers["x-should-retry"]) == (501, "false")
        assert "--embeddings" in response.json()["error"]["message"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert "without --embeddings" in bert.post(path, json={"prompt": "a"}).text


def test_requests_beyond_the_queue_wait_elsewhere_and_a_stopping_server_refuses(
    tmp_path: Path,
) -> None:
    embedder = Embedder(tiny.write_bert(tmp_path / "bert.gguf"), n_threads=1)
    served = _served(embedder, n_waiting_max=0, timeout=PATIENCE)
    with served as client:
        many: list[int] = []

        def ask() -> None:
            response = client.post("/embedding", json={"content": ["a b c d " * 7] * 2000})
            many.append(response.status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(many) == {200, 429}
        served.service.finish()
        assert client.post("/embedding", json={"content": "a"}).status_code == 503


def test_what_no_embedder_can_be_made_of(tmp_path: Path) -> None:
    path = tiny.write_bert(tmp_path / "bert.gguf")
    with pytest.raises(OptionError, match="trained for 64 tokens"):
        Embedder(path, n_ctx=65)
    embedder = Embedder(path, n_threads=1)
    embedder.close()
    embedder.close()
    with pytest.raises(GgufspecError, match="closed"):
        embedder.embed([1])
