"""llama-speculative-simple: what it is asked, and what is read of its log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from llama_build import PROGRAM

from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.errors import OptionError, PromptError
from ggufspec.llama.python_llama import BaselineRequest, BaselineText
from ggufspec.standin.embedded import embedded_draft
from tests.benchmarks import speculative_simple
from tests.benchmarks.speculative_simple import SpeculativeSimple, text_of

LOG = """\
 a text that says "decoded" and goes on
0.00.891.033 I encoded    6 tokens in    0.021 seconds, speed:  283.943 t/s
0.00.891.034 I decoded   97 tokens in    0.616 seconds, speed:  157.341 t/s
0.00.891.034 I\x20
0.00.891.034 I n_draft   = 3
0.00.891.035 I n_predict = 97
0.00.891.035 I n_drafted = 93
0.00.891.035 I n_accept  = 65
0.00.891.035 I accept    = 69.892%
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(embedded_draft(), n_ctx=64, n_threads=1, tuned=False) as made:
        yield made


def test_its_log() -> None:
    found = speculative_simple.parse(LOG)
    counts = (found.n_prompt, found.n_generated, found.n_drafted, found.n_accepted)
    assert counts == (6, 97, 93, 65)
    assert (found.prompt_seconds, found.generation_seconds) == (0.021, 0.616)
    assert found.tokens_per_second == pytest.approx(157.341, rel=1e-3)
    assert found.first_token_seconds == pytest.approx(0.021 + 0.616 / 32)
    with pytest.raises(OptionError, match="has no lines"):
        speculative_simple.parse("error: invalid argument")


def written_by(folder: Path, script: str, engine: Engine) -> BaselineText:
    """What a script in place of the program is read to have written."""
    path = folder / "llama-speculative-simple"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    tokens = engine.tokenize("It was so")
    (folder / "log").write_text(LOG.replace("encoded    6", f"encoded {len(tokens)}"))
    request = BaselineRequest(tokens, Sampling(temperature=0.7, top_k=20), 96, 3, False)
    return SpeculativeSimple(replace(PROGRAM, binary=path), engine.vocab).write(request)


def test_its_command_line_and_its_text(tmp_path: Path, engine: Engine) -> None:
    said = 'printf "\\n\\nIt was so dark\\n\\n\\n\\n"'
    script = f'echo "$@" > "{tmp_path}/command"; cat "{tmp_path}/log" >&2; {said}'
    found = written_by(tmp_path, script, engine)
    assert found.n_generated == 97
    assert list(found.tokens) == engine.vocab.tokenize_inside(" dark")
    command = (tmp_path / "command").read_text()
    assert "--temp 0.7 --top-k 20 --top-p 0.95 --min-p 0.05" in command
    assert "-p It was so --no-escape --seed 3 -n 95 " in command
    assert "--ignore-eos" not in command
    with pytest.raises(PromptError, match="it is 6 tokens for llama"):
        written_by(tmp_path, f"cat <<'END'\n{LOG}END", engine)


def test_a_failure_is_named(tmp_path: Path, engine: Engine) -> None:
    with pytest.raises(OptionError, match=r"code 3.*\n.*no such model"):
        written_by(tmp_path, "echo no such model >&2; exit 3", engine)
    tokens = engine.tokenize("It was")
    request = BaselineRequest(tokens, Sampling(), 8, 0, False)
    program = replace(PROGRAM, binary=tmp_path / "none")
    with pytest.raises(OptionError, match="give the path of a llama-speculative-simple"):
        SpeculativeSimple(program, engine.vocab).write(request)
    with pytest.raises(PromptError, match="no text has these"):
        SpeculativeSimple(program, engine.vocab).write(
            replace(request, tokens=[*tokens, engine.vocab.tokenize_inside("\u4e16")[0]])
        )


def test_a_log_that_lost_its_end_is_asked_for_again(tmp_path: Path, engine: Engine) -> None:
    script = f'cd "{tmp_path}"; if [ -e tried ]; then cat log; else touch tried; fi'
    assert written_by(tmp_path, script, engine).n_generated == 97


def test_the_text_of_tokens_is_one_that_has_them(engine: Engine, tmp_path: Path) -> None:
    for text in ("It was", " It was", "caf\u00e9 \u4e16\n\n", "x <|eos|> y"):
        assert text_of(engine.vocab, engine.tokenize(text)) == text
    tokens = engine.tokenize("It was")
    assert text_of(engine.vocab, [*tokens[:1], *(4 * [tokens[-1]])]) is not None
    pieces = [engine.vocab.piece(token) for token in range(engine.vocab.n_tokens)]
    assert text_of(engine.vocab, [*tokens, pieces.index(b"\xc3"), tokens[-1]]) is None
    with load(tiny.write_llama(tmp_path / "spm.gguf"), n_ctx=64, n_threads=1, tuned=False) as spm:
        for text in ("hello", " hello there", "a <unk> b"):
            with_bos = spm.tokenize(text)
            assert with_bos[0] == spm.vocab.bos
            shown = text_of(spm.vocab, with_bos)
            assert shown is not None
            assert spm.tokenize(shown) == with_bos
        split = [spm.vocab.bos, *tiny.SPM.spell("a"), *tiny.SPM.spell("b")]
        assert text_of(spm.vocab, split) in (None, "ab", " ab")
