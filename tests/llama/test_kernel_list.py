"""Our buffer type in ggml's list, which threads read as they compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from processes import python

from ggufspec.llama import kernels

pytestmark = pytest.mark.skipif(
    kernels.unusable() is not None, reason=f"no kernels here: {kernels.unusable()}"
)

# A thread of other code, which computes until the program ends.
OTHER = """
    import os, sys, threading
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_threads = 64, 1
    other = llama_cpp.llama_init_from_model(model, options)
    tokens = (llama_cpp.llama_token * 1)(300)
    computes = threading.Event()

    def compute():
        while True:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(other), True)
            assert llama_cpp.llama_decode(other, llama_cpp.llama_batch_get_one(tokens, 1)) == 0
            computes.set()

    threading.Thread(target=compute, daemon=True).start()
    computes.wait()
"""


# Ends without cleaning up, since nothing stops the thread of other code.
REASON = """
    from ggufspec.llama import kernels
    print(kernels.status().reason, flush=True)
    os._exit(0)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "model.gguf")


def run(*programs: str, model: Path | None = None) -> str:
    """The last line that a process prints."""
    return python(*programs, args=(model,))[-1]


def test_importing_ggufspec_is_enough_to_be_before_other_code(model: Path) -> None:
    assert run("import ggufspec.llama\n", OTHER, REASON, model=model) == "None"


def test_nothing_is_changed_while_another_thread_may_compute(model: Path) -> None:
    assert run(OTHER, REASON, model=model).startswith(
        "llama_cpp was imported before, and another thread may be computing: import "
    )


def test_llama_cpp_may_have_been_imported_before_by_a_process_with_one_thread() -> None:
    assert run("import os, llama_cpp\n", REASON) == "None"


def test_a_thread_that_reads_the_list_misses_no_type_but_the_one_left_out() -> None:
    """It goes on from where it was when the list is changed."""
    found = run(
        """
        from ggufspec.llama import kernels
        types, i = kernels.find_buffer_type("GGUFSPEC")
        following = types[i + 1]
        kernels.leave_out("GGUFSPEC")
        print(types[i + 1] == following, kernels.find_buffer_type("GGUFSPEC"))
        """
    )
    assert found == "True None"
