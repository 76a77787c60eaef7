"""The extension's kernels as a buffer type of ggml: which models take them, and when not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from processes import python
from small import small

from ggufspec import _native, standin
from ggufspec.llama import kernels
from ggufspec.models.quantization import header_of

pytestmark = pytest.mark.skipif(
    kernels.unusable() is not None, reason=f"no kernels here: {kernels.unusable()}"
)

# A pass over eight tokens, and the same tokens one by one: in bits of float32.
PASSES = """
    import sys
    import numpy as np
    from ggufspec.llama import kernels
    from ggufspec.llama.context import Context
    from ggufspec.llama.context_options import ContextOptions
    from ggufspec.llama.model import Model

    def logits(path, n, n_threads=2, mmap=True):
        model = Model(path, mmap=mmap)
        context = Context(model, ContextOptions(n_ctx=64, n_rows=8, n_threads=n_threads))
        tokens, found = [*range(300, 308)], []
        for i in range(0, 8, n):
            context.decode(tokens[i : i + n], n)
            found.append(np.array(context.rows(0, n)))
        context.close()
        used = model.kernels
        model.close()
        return np.concatenate(found), used
"""


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("models") / "model.gguf", "Q4_K_M")


def written(path: Path, type_: str) -> Path:
    """A small model with random weights of such a type."""
    source = header_of("small", small(), type_)
    standin.write(standin.plan(source, 1.0), path)
    return path


def run(program: str, *arguments: str | Path, before: str = "") -> list[str]:
    """The lines that a process prints, for which nothing has been loaded yet."""
    return python(before, PASSES, program, args=arguments)


def test_logits_are_those_of_llama_cpp_up_to_rounding(quantized: Path, tmp_path: Path) -> None:
    program = """
        found, used = logits(sys.argv[1], 8)
        np.save(sys.argv[2], found)
        print(*used.types)
    """
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for setting in ("on", "off"):
            patch.setenv(kernels.VARIABLE, setting)
            path = tmp_path / f"{setting}.npy"
            types = run(program, quantized, path)[-1].split()
            found.append((types, np.load(path)))
    (types, ours), (none, theirs) = found
    assert types
    assert none == []
    assert 0 < abs(ours - theirs).max() < 0.2 * theirs.std()


def test_other_code_in_the_process_keeps_llama_cpps_kernels(quantized: Path) -> None:
    """Before, between and after models that ggufspec has loaded."""
    lines = run(
        """
        import llama_cpp, ctypes
        _, used = logits(sys.argv[1], 8)
        kept = []
        callback = llama_cpp.llama_log_callback(lambda level, text, _: kept.append(text.decode()))
        llama_cpp.llama_log_set(callback, ctypes.c_void_p())
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
        llama_cpp.llama_model_free(model)
        print(bool(used.types), any("GGUFSPEC model buffer" in line for line in kept))
        """,
        quantized,
    )
    assert lines[-1] == "True False"


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            """
            params = llama_cpp.llama_model_default_params()
            model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
            """,
            "another part of this process has loaded a model before",
        ),
        (
            """
            from ggufspec.llama import devices
            devices.free_memory = lambda: 1000  # packed weights would not fit
            """,
            "None",
        ),
    ],
    ids=["other code", "memory"],
)
def test_where_llama_cpps_kernels_stay(before: str, reason: str, quantized: Path) -> None:
    program = "_, used = logits(sys.argv[1], 8)\nprint((*used.types,), kernels.status().reason)\n"
    before = f"import sys, llama_cpp\n{textwrap.dedent(before)}"
    assert run(program, quantized, before=before)[-1] == f"() {reason}"


def test_another_version_of_ggml_with_the_same_structures_is_used(quantized: Path) -> None:
    program = "_, used = logits(sys.argv[1], 8)\nprint(*used.types, kernels.status().reason)\n"
    before = "import llama_cpp\nllama_cpp.llama_cpp._lib.ggml_version = lambda: b'99.0'\n"
    assert run(program, quantized, before=before)[-1] == "q4_K q6_K None"


# Wraps functions of ggml as a version with other structures would have them.
NEWER = """
    import ctypes, llama_cpp
    library, kept = llama_cpp.llama_cpp._lib, []

    def wrap(name, change):
        real = getattr(library, name)
        def wrapped(*given):
            real.restype, real.argtypes = wrapped.restype, wrapped.argtypes
            return change(real(*given))
        setattr(library, name, wrapped)

    def insert_field(before):
        def change(address):
            at = _native.ggml_layout()
            whole = ctypes.string_at(address, at["tensor"])
            copy = whole[: at[before]] + bytes(8) + whole[at[before] : -8]
            kept.append(ctypes.create_string_buffer(copy))
            return ctypes.addressof(kept[-1])
        return change

    from ggufspec import _native
"""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("wrap('ggml_view_1d', insert_field('tensor.view_src'))", "tensor.view_src"),
        ("wrap('ggml_mul_mat', insert_field('tensor.op'))", "tensor.op"),
        ("wrap('ggml_mul_mat_id', insert_field('tensor.src'))", "tensor.src"),
        ("wrap('ggml_flash_attn_ext', insert_field('tensor.src'))", "tensor.src"),
        ("wrap('ggml_tensor_overhead', lambda size: size + 16)", "the size of a tensor"),
        ("wrap('ggml_type_name', lambda name: b'x' + name)", "the number of type f32"),
        ("wrap('ggml_backend_buft_get_device', lambda at: (at or 0) + 8)", "buffer_type.device"),
    ],
)
def test_a_version_of_ggml_with_other_structures_is_not_used(
    change: str, what: str, quantized: Path
) -> None:
    program = """
        import ggufspec
        with ggufspec.load(sys.argv[1], n_ctx=64) as engine:
            print((*engine.pair.target.model.kernels.types,), *engine.kernels)
    """
    before = f"{textwrap.dedent(NEWER)}\n{change}\n"
    reason = f"this version of ggml has changed what they use of it: {what}"
    found = run(program, quantized, before=before)[-1]
    assert found == f"() ggufspec's kernels are not used: {reason}"


def test_kernels_whose_trial_has_crashed_are_taken_out_and_not_put_in_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with other virtual functions, which no function of ggml returns."""
    monkeypatch.delenv(kernels.VARIABLE)
    crashes = """
        from ggufspec.common import child
        call = child.call
        child.call = lambda module, function: call("os", "abort")
    """
    program = "print(kernels.status().reason, kernels.find_buffer_type(kernels.BUFFER_TYPE))\n"
    for before in (textwrap.dedent(crashes), ""):
        assert run(program, before=before) == ["a trial in a child process has failed None"]


def test_two_models_are_used_at_once_freed_and_loaded_again(
    quantized: Path, tmp_path: Path
) -> None:
    other = written(tmp_path / "other.gguf", "Q8_0")
    lines = run(
        """
        first, used = logits(sys.argv[1], 8)
        beside = Model(sys.argv[2])
        again, _ = logits(sys.argv[1], 8)
        beside.close()
        other, used_there = logits(sys.argv[2], 8)
        last, _ = logits(sys.argv[1], 8)
        print((first == again).all() and (first == last).all())
        print(used.types != used_there.types)
        """,
        quantized,
        other,
    )
    assert lines[-2:] == ["True", "True"]


@pytest.mark.parametrize("spoiled", ["", "q8_0"])
def test_the_trial_finds_a_kernel_that_computes_something_else(spoiled: str) -> None:
    (line,) = run(f"from ggufspec.llama import kernel_trials as of; of.try_kernels({spoiled!r})")
    works, *types = line.split()
    assert works == "works"
    expected = {*_native.kernel_types(_native.kernel_instructions()[0])} - {spoiled}
    assert {*types} == expected


def test_they_are_tried_where_nothing_links_the_library_of_the_cpus_backend() -> None:
    """A build with GGML_BACKEND_DL: the functions of that library can only be asked for by name."""
    program = """
        from ggufspec.llama import devices, kernel_trials
        found = devices.ggml
        linked = lambda wanted: not any(name.startswith("ggml_backend_cpu_") for name in wanted)
        devices.ggml = lambda wanted: found(wanted) if linked(wanted) else None
        kernel_trials.try_kernels()
        """
    assert run(program)[-1].startswith("works ")


def test_ctrl_c_ends_a_pass_that_is_measured(quantized: Path) -> None:
    program = """
        import llama_cpp, signal, threading
        from ggufspec.measure.passes import Probe

        probe = Probe(Model(sys.argv[1]), 4096)
        whole = probe.seconds(4096, 1)
        threading.Timer(whole / 10, signal.raise_signal, [signal.SIGINT]).start()
        try:
            probe.seconds(4096, 1)
        except KeyboardInterrupt:
            memory = llama_cpp.llama_get_memory(probe.context.pointer)
            print(whole, llama_cpp.llama_memory_seq_pos_max(memory, 0))
    """
    seconds, last = run(program, quantized)[-1].split()
    assert float(seconds) > 0.5, "it asks for signals ten times a second"
    assert int(last) == -1, "the pass has ended before its end"


def test_packed_weights_beside_those_of_the_file_compute_the_same(quantized: Path) -> None:
    lines = run(
        """
        from ggufspec import _native
        from ggufspec.llama import kernel_offer
        offer = _native.offer_kernels

        class Both:
            Context = _native.Context
            offer_kernels = staticmethod(lambda types, both=False: offer(types, bool(types)))

        first, used = logits(sys.argv[1], 8)
        kernel_offer._native = Both
        for mmap in (True, False):
            again, _ = logits(sys.argv[1], 8, mmap=mmap)
            print(bool(used.types), (first == again).all())
        """,
        quantized,
    )
    assert lines[-2:] == ["True True"] * 2


def test_a_forked_process_computes_the_same(quantized: Path) -> None:
    lines = run(
        """
        import os
        first, used = logits(sys.argv[1], 8, n_threads=1)
        child = os.fork()
        if not child:
            again, _ = logits(sys.argv[1], 8, n_threads=1)
            os._exit(0 if (first == again).all() else 3)
        print(os.waitpid(child, 0)[1], bool(used.types))
        """,
        quantized,
    )
    assert lines[-1] == "0 True"
