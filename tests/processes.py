"""Runs programs in processes of their own, for which nothing has been loaded yet."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def python(*program: str, args: tuple[object, ...] = (), **env: str) -> list[str]:
    """The lines that a program prints; it must end well. Its parts are dedented one by one."""
    code = "".join(map(textwrap.dedent, program))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-800:]}{done.stderr[-1500:]}"
    return done.stdout.splitlines()
