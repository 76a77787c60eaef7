"""llama.cpp: models, contexts, sessions, devices; the only importer of llama_cpp."""

try:
    import llama_cpp  # noqa: F401
except (ImportError, OSError, RuntimeError) as error:
    from ggufspec.llama.install import load_error

    raise load_error(error) from error
