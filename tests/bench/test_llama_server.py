"""llama.cpp's programs: what they are asked, what they answer, and that nothing of them is left."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from llama_build import ANSWER, PROGRAM, Build

from ggufspec.bench import llama_server
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError
from ggufspec.llama.python_llama import BaselineRequest
from ggufspec.models.adapters import Adapter
from ggufspec.models.gguf_file import DENSE, EXPERTS
from ggufspec.placement.overrides import on_cpu

GREEDY = Sampling(temperature=0)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


# What they are asked


def test_the_command_line_of_a_server() -> None:
    line = llama_server.command(PROGRAM, 8123)
    assert _after(line, "-md") == ["d.gguf"]
    assert _after(line, "--spec-type") == ["draft-simple"]
    assert _after(line, "-c") + _after(line, "-t") + _after(line, "-td") == ["1024", "4", "1"]
    assert _after(line, "-np") + _after(line, "--port") == ["1", "8123"]
    assert _after(line, "--host") == ["127.0.0.1"]
    kept = replace(PROGRAM, overrides=on_cpu(EXPERTS, 1), overrides_draft=on_cpu(DENSE, -1))
    line = llama_server.command(kept, 8123)
    assert _after(line, "-ot") == [rf"blk\.(0){EXPERTS}=CPU"]
    assert _after(line, "-otd") == [rf"{DENSE}=CPU"]
    adapters = (Adapter(Path("a.gguf")), Adapter(Path("b.gguf"), -0.5))
    line = llama_server.command(replace(PROGRAM, adapters=adapters), 8123)
    assert line[line.index("--lora-scaled") :][:4] == [
        *("--lora-scaled", "a.gguf:1.0"),
        *("--lora-scaled", "b.gguf:-0.5"),
    ]
    plain = llama_server.command(replace(PROGRAM, draft=None), 8123)
    assert not {"-md", "--spec-type", "-td", "-ngld"} & set(plain)


def test_the_request_to_a_server() -> None:
    sampling = Sampling(
        temperature=0.7, dry_penalty_last_n=-1, logit_bias={5: -math.inf, 6: 1.5}, min_p=0.1
    )
    asked = json.loads(
        json.dumps(
            llama_server.request_body(
                BaselineRequest([1, 2], sampling, 8, 3, True, dry_sequence_breakers=(".",)), 256
            ),
            allow_nan=False,
        )
    )
    assert (asked["prompt"], asked["n_predict"], asked["seed"]) == ([1, 2], 9, 3)
    assert (asked["cache_prompt"], asked["ignore_eos"]) == (False, True)
    assert (asked["temperature"], asked["min_p"]) == (0.7, pytest.approx(0.1))
    assert (asked["dry_penalty_last_n"], asked["repeat_last_n"]) == (256, 64)
    assert asked["logit_bias"] == [[5, False], [6, 1.5]]
    assert asked["samplers"][-3:] == ["min_p", "xtc", "temperature"]
    assert asked["mirostat"] == 0, "a file may ask for it"


def _after(line: Sequence[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(line) if name == option]


# What they answer


def test_the_answer_of_a_server() -> None:
    found = llama_server.parse(json.dumps(ANSWER).encode())
    assert (found.n_prompt, found.n_generated, found.n_drafted, found.n_accepted) == (4, 5, 5, 3)
    assert found.prompt_seconds == pytest.approx(0.021606)
    assert found.generation_seconds == pytest.approx(0.115002)
    assert found.tokens == (15, 399, 306, 3794, 13, 273)
    timings = {name: ms for name, ms in ANSWER["timings"].items() if "draft" not in name}  # type: ignore[attr-defined]
    plain = llama_server.parse(json.dumps({**ANSWER, "timings": timings}).encode())
    assert (plain.n_drafted, plain.n_accepted) == (0, 0)
    for wrong in (b"{}", b"[]", b"no"):
        with pytest.raises(OptionError, match="not as llama-server writes it"):
            llama_server.parse(wrong)


def test_a_server_gets_requests_when_ready_and_is_stopped_at_the_end(build: Build) -> None:
    with llama_server.running(build.server()) as server:
        assert len(build.left) == 1
        found = server.write(BaselineRequest([1, 2, 3], GREEDY, 3, 0, False))
    assert (found.n_prompt, found.tokens) == (3, (30, 31, 32, 33))
    assert build.left == []


def test_a_server_is_stopped_by_an_error(build: Build) -> None:
    with pytest.raises(KeyboardInterrupt), llama_server.running(build.server()):
        raise KeyboardInterrupt
    assert build.left == []


def test_a_server_that_does_not_end_is_killed(build: Build) -> None:
    with llama_server.running(build.server("stubborn"), stop_seconds=0.1):
        pass
    assert build.left == []


def test_a_server_that_does_not_start_shows_its_log(build: Build) -> None:
    with (
        pytest.raises(OptionError, match=r"code 1 before it was ready.*\n.*failed to load model"),
        llama_server.running(build.server("fails")),
    ):
        pass
    with (
        pytest.raises(OptionError, match=r"was not ready within 0.5 s.*\n.*listening"),
        llama_server.running(build.server("never ready"), start_seconds=0.5),
    ):
        pass
    assert build.left == []
    with (
        pytest.raises(OptionError, match="give the folder of a llama-server"),
        llama_server.running(replace(PROGRAM, binary=build.folder / "none")),
    ):
        pass


def test_a_server_that_fails_at_a_text_says_why(build: Build) -> None:
    with (
        llama_server.running(build.server("refuses")) as server,
        pytest.raises(OptionError, match=r"status 400: .*no such field"),
    ):
        server.write(BaselineRequest([1], GREEDY, 1, 0, False))
    with (
        llama_server.running(build.server("dies")) as server,
        pytest.raises(OptionError, match=r"(?s)its log ends with:.*GGML_ASSERT"),
    ):
        server.write(BaselineRequest([1], GREEDY, 1, 0, False))
