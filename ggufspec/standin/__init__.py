"""Stand-ins: model files with the size and speed of other models, to measure without a download."""

from ggufspec.models.gguf_file import GgufFile, check_path, write
from ggufspec.standin.file import plan, source_from_dimensions, source_of

__all__ = ["GgufFile", "check_path", "plan", "source_from_dimensions", "source_of", "write"]
