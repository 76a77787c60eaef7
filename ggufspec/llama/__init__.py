"""llama.cpp: models, contexts, sessions, devices; the only importer of llama_cpp."""

import sys

IS_FIRST = "llama_cpp" not in sys.modules  # so no other code has used llama.cpp
try:
    import llama_cpp  # noqa: F401
except (ImportError, OSError, RuntimeError) as error:
    from ggufspec.llama.install import load_error

    raise load_error(error) from error

from ggufspec.llama import kernels  # noqa: E402, F401  (puts ours into ggml's list)
