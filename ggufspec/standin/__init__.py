"""Stand-ins: files with the size and speed of other models, to measure without a download."""

from ggufspec.standin.file import check_path, plan, write
from ggufspec.standin.gguf_file import GgufFile
from ggufspec.standin.source import (
    SourceModel,
    source_from_dimensions,
    source_from_header,
    source_of,
)

__all__ = [
    "GgufFile",
    "SourceModel",
    "check_path",
    "plan",
    "source_from_dimensions",
    "source_from_header",
    "source_of",
    "write",
]
