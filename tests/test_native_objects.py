"""What the object files of native/ share with each other, and leave for the end of the process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A file of an instruction set for each machine, with its options in CMakeLists.txt.
FILES = {
    "x86_64": ("avx2", ["-mavx2", "-mfma", "-mf16c"]),
    "aarch64": ("neon_dotprod", ["-march=armv8.2-a+dotprod"]),
}

pytestmark = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


def symbols(path: Path, *options: str) -> Iterator[str]:
    """The external symbols that a file defines, or with `-u`, needs."""
    done = subprocess.run(["nm", *options, path], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        yield line.split()[-1]


@pytest.fixture(scope="module")
def objects() -> list[Path]:
    """The object files of the newest build of an editable install."""
    builds = sorted(ROOT.glob("build/*/CMakeFiles"), key=lambda folder: folder.stat().st_mtime)
    found = sorted(builds[-1].glob("*.dir/native/**/*.o")) if builds else []
    if not found:
        pytest.skip("the extension was built elsewhere")
    return found


def test_a_file_of_an_instruction_set_defines_one_symbol(objects: list[Path]) -> None:
    """Of functions that several files define, the linker keeps one, of any instruction set."""
    for path in objects:
        if "_native.dir" not in path.parts:
            assert len([*symbols(path, "-g", "--defined-only")]) == 1, path


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
@pytest.mark.skipif(platform.machine() not in FILES, reason="no file for this processor")
def test_it_does_so_where_the_compiler_puts_no_function_in_place(tmp_path: Path) -> None:
    name, options = FILES[platform.machine()]
    source, made = ROOT / f"native/matmul/{name}.cpp", tmp_path / "made.o"
    subprocess.run(["c++", "-std=c++17", "-O0", *options, "-c", source, "-o", made], check=True)
    assert [name in each for each in symbols(made, "-g", "--defined-only")] == [True]


@pytest.mark.skipif(os.name == "nt", reason="the symbol is that of ELF and Mach-O")
def test_nothing_is_destroyed_at_the_end_of_the_process(objects: list[Path]) -> None:
    """Threads may still compute then."""
    assert not [path for path in objects if "__cxa_atexit" in "".join(symbols(path, "-u"))]
