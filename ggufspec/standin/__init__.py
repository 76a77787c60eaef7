"""Stand-ins: model files with the size and speed of other models, to measure without a download."""

from ggufspec.models.gguf_file import GgufFile, check_path, write
from ggufspec.standin.file import plan

__all__ = ["GgufFile", "check_path", "plan", "write"]
