"""The command that builds llama-cpp-python, and why a build of it cannot be loaded."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from typing import Final

from ggufspec.errors import LibraryError

PACKAGE: Final = "llama-cpp-python"
_FLAGS: Final = {"MTL": "METAL", "ROCm": "HIP"}  # names of ggml's whose option of CMake differs


def build_command(backends: Iterable[str]) -> str:
    """The command that builds llama-cpp-python again with these backends, or options, of ggml."""
    names = (name for name in dict.fromkeys(backends) if name != "CPU")
    flags = " ".join(f"-DGGML_{_FLAGS.get(name, name).upper()}=on" for name in names)
    variables = f'CMAKE_ARGS="{flags}" ' if flags else ""
    return f"{variables}{_pip('--no-cache-dir', '--no-binary', PACKAGE)}"


def _pip(*options: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes long to import

    python = shlex.quote(sys.executable or "python3")
    try:
        package = f"--force-reinstall --no-deps {' '.join(options)} {PACKAGE}=={version(PACKAGE)}"
    except PackageNotFoundError:
        package = " ".join((*options, PACKAGE))
    return f"{python} -m pip install {package}"


def load_error(error: Exception) -> LibraryError:
    """The error for an `import llama_cpp` that failed: what is missing, and what to do."""
    index = "https://abetlen.github.io/llama-cpp-python/whl/cpu"
    wheel = _pip("--only-binary", PACKAGE, "--extra-index-url", index)
    build = f"build {PACKAGE} for this machine:\n  {build_command(())}"
    either = f"{build}\nor install a prebuilt wheel, without a compiler:\n  {wheel}"
    if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
        return LibraryError(f"{PACKAGE} is not installed; {either}")
    return LibraryError(
        f"llama.cpp cannot be loaded ({error}). Install the library that is missing (libcuda: "
        "NVIDIA's driver; libcudart, libcublas: the CUDA toolkit; libgomp, libvulkan: packages of "
        f"the system), or {either}"
    )
