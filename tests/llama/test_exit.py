"""The process ends while other threads compute."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import python
from small import small

from ggufspec import standin
from ggufspec.models.quantization import header_of

N_EXITS = int(os.environ.get("GGUFSPEC_TEST_EXITS", "8"))  # 200 find rare crashes

# One process loads a model; each of its forks ends while a daemon thread computes.
PROGRAM = """
    import os, sys, threading, time
    from ggufspec.llama.context import Context
    from ggufspec.llama.context_options import ContextOptions
    from ggufspec.llama.model import Model

    model = Model(sys.argv[1])
    context = Context(model, ContextOptions(n_ctx=64, n_rows=8, n_threads=1))

    def compute():
        while True:
            context.truncate(0)
            context.decode([*range(300, 308)], 8)

    ended = []
    for i in range(int(sys.argv[2])):
        child = os.fork()
        if not child:
            threading.Thread(target=compute, daemon=True).start()
            time.sleep(0.02 + i % 10 * 0.0007)
            sys.exit()
        ended.append(os.waitpid(child, 0)[1])
    print(ended)
"""


def test_llama_cpp_calls_no_python_once_python_ends() -> None:
    program = """
        import atexit
        import llama_cpp
        missing = llama_cpp.llama_model_load_from_file
        atexit.register(missing, b"missing.gguf", llama_cpp.llama_model_default_params())
        import ggufspec.llama.log
        missing(b"first.gguf", llama_cpp.llama_model_default_params())
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert "first.gguf" in done.stderr
    assert "missing.gguf" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_process_ends_in_order_while_a_daemon_thread_computes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    standin.write(standin.plan(header_of("small", small(), "Q4_0"), 1.0), path)
    # A failed test would wait for gdb.
    ended = python(PROGRAM, args=(path, N_EXITS), GGML_NO_BACKTRACE="1")
    assert ended == [str([0] * N_EXITS)]
