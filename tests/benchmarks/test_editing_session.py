"""The typed session: what is sent, and what is read of answers."""

from __future__ import annotations

from pathlib import Path

import tiny
from serving import serving

import ggufspec
from tests.benchmarks import editing_session
from tests.benchmarks.editing_session import EDITED, FUNCTIONS, Answer

FILE = editing_session.files()[EDITED]
REQUESTS = editing_session.typed(FILE, FUNCTIONS, 40)


def test_the_cursor_moves_on_through_the_functions() -> None:
    assert len(REQUESTS) == 40
    lengths = [len(each.prefix) for each in REQUESTS]
    assert lengths == sorted(set(lengths))
    for prefix, suffix in REQUESTS:
        assert FILE.startswith(prefix)
        assert FILE.endswith(suffix.rstrip())
        assert len(prefix) + len(suffix) < len(FILE), "a part is to be written"
    for name in FUNCTIONS:
        assert any(
            f"def {name}" in prefix.rpartition("\ndef ")[1] + prefix for prefix, _ in REQUESTS
        )


def test_answers_are_timed_and_counted(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "coder.gguf", vocab=tiny.CODE, n_ctx_train=8192)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        body = {"n_predict": 5, "ignore_eos": True}
        found = list(editing_session.asked(live.address[1], REQUESTS[:2], body))
    assert [each.n_tokens for each in found] == [5, 5]
    assert all(0 < each.first_seconds <= each.seconds for each in found)


def test_the_report_compares_with_the_best_of_llama_server_in_each_run() -> None:
    def run(seconds: float) -> list[Answer]:
        return [Answer(seconds / 10, seconds, 7)] * 10

    found = {
        "llama-server": [run(3.0), run(2.0)],
        "llama-server with draft": [run(2.0), run(4.0)],
        "ggufspec": [run(1.0), run(1.5)],
    }
    text = editing_session.report(found)
    assert "| ggufspec | 0.12, 0.15 | 1.25, 1.50 | 12.5 | 0.62 | 70 |" in text
    assert "| llama-server | 0.25, 0.30 | 2.50, 3.00 | 25.0 | 1.25 | 70 |" in text
