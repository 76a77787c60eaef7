"""Trees are refused, or left out, where the target reads chains only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

import ggufspec

CHAINS_ONLY = [(tiny.write_mamba, "recurrent layers"), (tiny.write_swa, "a sliding window")]
Writer = Callable[[Path], Path]


@pytest.mark.parametrize(("writer", "reason"), CHAINS_ONLY)
def test_a_target_that_reads_no_trees_says_why(writer: Writer, reason: str, tmp_path: Path) -> None:
    path = writer(tmp_path / "target.gguf")
    with ggufspec.load(path, path, n_threads=1, n_draft_max=4) as engine:
        with pytest.raises(ggufspec.OptionError, match=rf"{reason}.*use 'auto' or 'off' \(--tree"):
            engine.stream([1], tree="on")
        for tree in ("auto", "off"):
            stats = engine.generate([1, 5], tree=tree, n_draft=3, max_tokens=6, seed=0).stats
            assert sum(stats.drafted_by_position) == stats.n_drafted > 0
        assert engine.chains_only is not None
        assert reason in engine.chains_only
