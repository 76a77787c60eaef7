"""Trees are refused, or left out, where the target reads chains only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

import ggufspec
from ggufspec.decoding import verify as rules
from ggufspec.engine.options import CheckedOptions

CHAINS_ONLY = [(tiny.write_mamba, "recurrent layers"), (tiny.write_swa, "a sliding window")]
Writer = Callable[[Path], Path]
OWN_RULE = """
from ggufspec.decoding.verify import rule

def verify(draft, target_probs, uniforms):
    assert not draft.parents
    return rule("rejection")(draft, target_probs, uniforms)
"""


@pytest.mark.parametrize(("writer", "reason"), CHAINS_ONLY)
def test_a_target_that_reads_no_trees_says_why(writer: Writer, reason: str, tmp_path: Path) -> None:
    path = writer(tmp_path / "target.gguf")
    with ggufspec.load(path, path, n_threads=1, n_draft_max=4) as engine:
        with pytest.raises(ggufspec.OptionError, match=rf"{reason}.*use 'auto' or 'off' \(--tree"):
            engine.stream([1], tree="on")
        for tree in ("auto", "off"):
            stats = engine.generate([1, 5], tree=tree, n_draft=3, max_tokens=6, seed=0).stats
            assert sum(stats.drafted_by_position) == stats.n_drafted > 0
        assert engine.pair.chains_only is not None
        assert reason in engine.pair.chains_only


def test_where_there_is_room_for_one_token_the_message_says_so(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "target.gguf")
    with ggufspec.load(path, path, n_threads=1, n_draft_max=1) as engine:
        assert engine.pair.chains_only is not None
        assert "recurrent" not in engine.pair.chains_only
        assert "drafts of 1 token and 1 slot leave no room" in engine.pair.chains_only


def test_a_rule_for_chains_gets_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rule.py").write_text(OWN_RULE)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    path = tiny.write_llama(tmp_path / "target.gguf")
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_layer=1)
    with ggufspec.load(path, draft, n_threads=1, n_draft_max=4) as engine:
        engine.generate([1, 5], n_draft="auto", max_tokens=24, verify="own_rule")
        assert engine.pair.n_leaves(CheckedOptions.of({"verify": "own_rule"})) == 1
        assert engine.pair.n_leaves(CheckedOptions.of({})) > 1
        with pytest.raises(ggufspec.OptionError, match="'own_rule' judges chains"):
            engine.stream([1, 5], tree="on", verify="own_rule")
