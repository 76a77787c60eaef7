"""The error tree: everything that a user can cause. Knows no click, no exit codes, no llama.cpp.

    GgufspecError
    |-- OptionError      an option or argument has a value that cannot be used
    |-- PromptError      the prompt cannot be decoded: empty, too long, not text
    |-- ModelError       a file is missing, damaged, or not a model that writes text
    |   `-- VocabError   target and draft do not share a vocabulary
    |-- DecodeError      llama.cpp refused or failed to decode a batch
    |-- OutOfMemoryError  a context does not fit into the memory of the machine
    |-- DownloadError    the hub has it not, refuses it, or the connection to it fails
    |-- ClusterError     a Ray cluster is not there, or not as its workers need it
    |-- RpcError         a server that is to compute layers is not there, or not to be used
    |-- CacheError       a folder or the disk does not take what must be written there
    `-- ClosedError      something was used after it was closed

Each message says what was found, what was needed, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "ClosedError",
    "ClusterError",
    "DecodeError",
    "DownloadError",
    "GgufspecError",
    "ModelError",
    "OptionError",
    "OutOfMemoryError",
    "PromptError",
    "RpcError",
    "VocabError",
]


class GgufspecError(Exception):
    """Base of every error that a user can cause."""


class OptionError(GgufspecError, ValueError):
    """An option or argument has a value that cannot be used."""


class PromptError(GgufspecError, ValueError):
    """The prompt cannot be decoded: it is empty, too long for the context, or not text."""


class ModelError(GgufspecError):
    """A file is missing, damaged, or not a model that writes text."""


class VocabError(ModelError):
    """Target and draft do not share a vocabulary."""


class OutOfMemoryError(GgufspecError):
    """A model or its context does not fit into the memory of the machine."""


class DecodeError(GgufspecError):
    """llama.cpp refused or failed to decode a batch."""


class DownloadError(GgufspecError):
    """A model could not be had from the hub: it is not there, refused, damaged, or out of reach."""


class ClusterError(GgufspecError):
    """A Ray cluster is not there, or not as its workers need it."""


class RpcError(GgufspecError):
    """A server of llama.cpp's RPC backend is not there, is taken, or is another thing."""


class CacheError(GgufspecError):
    """A folder or the disk does not take what must be written there."""


class ClosedError(GgufspecError):
    """Something was used after it was closed."""
