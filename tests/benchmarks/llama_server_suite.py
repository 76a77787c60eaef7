"""Runs llama.cpp's server tests against llama-server and against `ggufspec serve`, and compares.

    python -m tests.benchmarks.llama_server_suite --suite llama.cpp/tools/server/tests \\
        --llama-server build/bin/llama-server --model stories260K.gguf

Lists the tests of OpenAI's surface that llama-server passes and `ggufspec serve` does not. Files
and endpoints that are llama.cpp's own are left out, and so are tests of models other than --model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.benchmarks.llama_server_adapter import Adapter
from tests.benchmarks.llama_server_plugin import RESULT_VARIABLE

_ROOT = Path(__file__).parents[2]
_MODEL_REPOSITORY = "ggml-org/test-model-stories260K"
_FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_security.py",
    "test_template.py",
    "test_tokenize.py",
    "test_tool_call.py",
)
_OWN_PATHS = {
    "/completion": "llama.cpp's own completions",
    "/slots": "slots",
    "/apply-template": "rendering without an answer",
    "/chat/completions/input_tokens": "counting without an answer",
    "/cors-proxy": "a proxy",
}
# Tests that fail for a reason which stays, by name.
_VERBOSE = "reads the prompt from `__verbose`, llama.cpp's own"
_REASONS: dict[str, str] = {
    "test_basic.py::test_server_multiple_addresses": "one address a server: no list in --host",
    "test_basic.py::test_server_model_aliases_and_tags": "--tags, llama.cpp's own",
    "test_chat_completion.py::test_chat_template": _VERBOSE,
    "test_chat_completion.py::test_chat_template_assistant_prefill*": _VERBOSE,
    "test_chat_completion.py::test_chat_template_*_vllm_compat": _VERBOSE,
    "test_chat_completion.py::test_context_size_exceeded*": "the type is OpenAI's, beside the code "
    "context_length_exceeded and llama.cpp's n_prompt_tokens and n_ctx",
    "test_chat_completion.py::test_verbose_debug": _VERBOSE,
    "test_chat_completion.py::test_return_progress*": "progress of a prompt, llama.cpp's own",
    "test_security.py::test_cors_*": "pages of other origins need --cors-origin, exactly",
    "test_security.py::test_correct_api_key*": "reads llama.cpp's own completion at /completions",
    "test_*completion_with_openai_library": "wants llama.cpp's build number as the fingerprint",
    "test_chat_completion.py::test_invalid_chat_completion_req?messages7?": "two last messages of "
    "the assistant are rendered, as the template says",
}


def run(suite: Path, adapter: Adapter, chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The outcome of each test, by name."""
    with tempfile.TemporaryDirectory() as folder:
        starter = Path(folder, "server")
        starter.write_text(
            f"#!/bin/sh\nexport PYTHONPATH='{_ROOT}'\n"
            f"exec '{sys.executable}' -m tests.benchmarks.llama_server_adapter \"$@\"\n"
        )
        starter.chmod(0o755)
        environment = {
            **os.environ,
            **adapter.to_environment(),
            RESULT_VARIABLE: f"{folder}/result.json",
            "LLAMA_SERVER_BIN_PATH": str(starter),
            "LLAMA_CACHE": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(_ROOT),
            "TMPDIR": folder,
        }
        arguments = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow"]
        arguments += ["-p", "tests.benchmarks.llama_server_plugin"]
        arguments += [f"unit/{name}" for name in chosen]
        command = [sys.executable, "-m", "pytest", *arguments]
        subprocess.run(command, cwd=suite, env=environment, stdout=sys.stderr, check=False)
        return {each["name"]: each for each in json.loads(Path(folder, "result.json").read_text())}


def is_of_openai(test: dict[str, Any]) -> bool:
    """Whether llama-server passes a test that asks for no endpoint of its own."""
    return test["ended"] == "passed" and not _OWN_PATHS.keys() & set(test["paths"])


def compare(theirs: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the tests that only llama-server passes, with the reason."""
    counts: Counter[str] = Counter()
    lacking, other_text = {}, []
    for name, their in theirs.items():
        if their["ended"] != "passed":
            counts[f"llama-server: {their['ended']}"] += 1
        elif not is_of_openai(their):
            own = next(path for path in their["paths"] if path in _OWN_PATHS)
            counts[f"left out: {_OWN_PATHS[own]}"] += 1
        elif ours[name]["ended"] == "passed":
            counts["both pass"] += 1
            if ours[name]["other_text"]:
                other_text.append(name)
        else:
            counts["only llama-server passes"] += 1
            kept = (why for test, why in _REASONS.items() if fnmatch(name, test))
            lacking[name] = next(kept, ours[name]["message"].partition("\n")[0])
    return {
        "counts": dict(counts),
        "only llama-server passes": lacking,
        "pass, but for a sampled text": other_text,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m " + __spec__.name)
    parser.add_argument("--suite", type=Path, required=True, help="llama.cpp's tools/server/tests")
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--command", help="[default: ggufspec serve of this tree]")
    parser.add_argument("--model", required=True, help="stories260K.gguf")
    parser.add_argument("--only", nargs="*", default=_FILES, help="files, or tests of them")
    options = parser.parse_args(arguments)
    models = {_MODEL_REPOSITORY: str(Path(options.model).absolute())}
    llama_server = [str(Path(options.llama_server).absolute())]
    ggufspec = [sys.executable, "-m", "ggufspec", "serve"]
    ggufspec = shlex.split(options.command) if options.command else ggufspec
    theirs = run(options.suite, Adapter(llama_server, True, models), options.only)
    wanted = [name for name, test in theirs.items() if is_of_openai(test)]
    ours = run(options.suite, Adapter(ggufspec, False, models), wanted)
    sys.stdout.write(json.dumps(compare(theirs, ours), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
