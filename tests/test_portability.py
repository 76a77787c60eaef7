"""native/ compiles for the systems that wheels are built for: by zig's Clang, without a warning.

The three targets reach each branch of the sources: both processors, Windows (32-bit long), macOS,
musl. The bindings are left out, since they need the headers of a Python of the target. For musl
only files with code for Linux are compiled: the others are the same as for macOS. For Windows, the
files that need no flags of their own are compiled as one, which reads the standard library's
headers once: for macOS each is compiled alone, so each includes what it needs. zig keeps what it
has compiled: only the first run, and changed files, take seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("ziglang", reason="needs ziglang, of the extra dev")
NATIVE = Path(__file__).parents[1] / "native"
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-g0", "-fno-sanitize=undefined"]
X86 = ["-DGGUFSPEC_LEVELS", "-DGGUFSPEC_X86"]
NEON = ["-DGGUFSPEC_NEON"]
TARGETS = {"x86_64-windows-gnu": X86, "aarch64-macos": NEON, "aarch64-linux-musl": NEON}
# Files for one processor, with the flags of CMakeLists.txt in zig's spelling.
ARM_KERNELS = {"neon.cpp": [], "neon_dotprod.cpp": ["-mcpu=generic+v8_2a+dotprod"]}
X86_KERNELS = {
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "avx_vnni.cpp": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512.cpp": [f"-mavx512{part}" for part in ("f", "bw", "vl")] + ["-mfma", "-mf16c"],
    "avx512_vnni.cpp": [f"-mavx512{part}" for part in ("f", "bw", "vl", "vnni")]
    + ["-mfma", "-mf16c"],
}


def compiled(target: str, source: Path, flags: list[str], folder: Path) -> str:
    """What the compiler says about the file: nothing if it has no complaint."""
    to = folder / f"{source.parent.name}_{source.stem}.o"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *FLAGS, *flags]
    done = subprocess.run([*command, "-c", source, "-o", to], capture_output=True, text=True)
    assert done.returncode == 0 or done.stderr, f"{source.name}: exit code {done.returncode}"
    return done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_without_warnings(target: str, tmp_path: Path) -> None:
    special, others = X86_KERNELS, ARM_KERNELS
    if target.startswith("aarch64"):
        special, others = others, special
    files = [
        each for each in sorted(NATIVE.rglob("*.cpp")) if not each.name.endswith("bindings.cpp")
    ]
    sources = [each for each in files if each.name not in others]
    assert {*special} < {each.name for each in sources}
    if "linux" in target:
        sources = [each for each in sources if "__linux__" in each.read_text()]
        assert sources
    together: list[str] = []
    if "windows" in target:
        first, *rest = [each for each in sources if each.name not in special]
        sources = [first, *(each for each in sources if each.name in special)]
        together = [part for each in rest for part in ("-include", str(each))]
    flags = [[*TARGETS[target], *special.get(each.name, together)] for each in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(
            lambda file, given: compiled(target, file, given, tmp_path), sources, flags
        )
        assert "".join(found) == ""
