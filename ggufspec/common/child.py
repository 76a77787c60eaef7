"""Calls a function in a child process, so that a crash of llama.cpp ends only the child."""

from __future__ import annotations

import os
import subprocess
import sys

SECONDS = 60.0  # time limit of a child; it has to start an interpreter and load libllama


def call(module: str, function: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Call `module.function(*arguments)` in a child that has the import path of this process.

    Raises OSError if no process can be started, subprocess.TimeoutExpired after SECONDS.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; "
        f"{function}(*{arguments!r})"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        timeout=SECONDS,
        check=False,
    )
