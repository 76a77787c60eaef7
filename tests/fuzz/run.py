"""Fuzzes one target for a while, and keeps the inputs that fail.

python tests/fuzz/run.py TARGET [SECONDS]: guided by coverage if `atheris` is installed (pip install
atheris), which keeps new inputs in build/fuzz/TARGET; else with random changes of the corpus.
Mend each failure, and copy a small input that shows it to tests/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import traceback
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
CORPUS = Path(__file__).parent / "corpus"


class Run:
    """What was tried so far; each kind of failure is told once."""

    def __init__(self, name: str, seconds: float) -> None:
        from fuzz.targets import TARGETS

        self._target, self._folder = TARGETS[name], ROOT / "build/fuzz" / name
        self._ends, self.n, self._kinds = time.monotonic() + seconds, 0, set[str]()
        (self._folder / "inputs").mkdir(parents=True, exist_ok=True)

    def once(self, data: bytes) -> None:
        from fuzz.targets import try_input

        if time.monotonic() > self._ends:
            sys.stderr.write(f"{self.n:,} inputs, {len(self._kinds)} kinds of failures\n")
            os._exit(0)  # else libFuzzer takes the end for a failure
        self.n += 1
        try:
            try_input(self._target, data)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            if (kind := f"{type(error).__name__} {last.filename}:{last.lineno}") not in self._kinds:
                self._kinds.add(kind)
                path = self._folder / hashlib.sha256(data).hexdigest()[:12]
                path.write_bytes(data)
                traceback.print_exc()
                sys.stderr.write(f"FAILED: {path} ({len(data):,} bytes)\n")


def main() -> None:
    name, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
    try:
        import atheris
    except ImportError:
        from fuzz.mutations import mutated

        run, random = Run(name, seconds), Random(0)
        seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
        while True:
            run.once(mutated(seeds, random))
    # Atheris counts nothing in modules that the loader of an editable install reads.
    import ggufspec._native

    package = Path(str(ggufspec._native.__file__)).parent
    sys.meta_path[:] = [each for each in sys.meta_path if "Redirecting" not in type(each).__name__]
    for module in [each for each in sys.modules if each.startswith("ggufspec")]:
        if module != "ggufspec._native":
            del sys.modules[module]
    with atheris.instrument_imports(include=["ggufspec"]):
        import ggufspec

        ggufspec.__path__.append(str(package))
        run = Run(name, seconds)
    kept = ROOT / "build/fuzz" / name / "inputs"
    options = [
        "-max_len=16384",
        "-timeout=60",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={kept.parent}/",
    ]
    atheris.Setup([sys.argv[0], str(kept), str(CORPUS / name), *options], run.once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
