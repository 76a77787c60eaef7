"""The errors that a user can cause; all descend from GgufspecError."""

from __future__ import annotations

__all__ = [
    "CacheError",
    "ClosedError",
    "ClusterError",
    "ConstraintError",
    "DecodeError",
    "DownloadError",
    "GgufspecError",
    "LibraryError",
    "ModelError",
    "NoRoomError",
    "OptionError",
    "OutOfMemoryError",
    "PromptError",
    "PromptTooLongError",
    "RpcError",
    "SessionError",
    "VocabError",
]


class GgufspecError(Exception):
    """The base of all errors that a user can cause."""


class OptionError(GgufspecError, ValueError):
    """An option or argument has a value that cannot be used."""


class PromptError(GgufspecError, ValueError):
    """The prompt cannot be decoded: it is empty, too long for the context, or not text."""


class PromptTooLongError(PromptError):
    """A context of `n_ctx` tokens is too small for `n_prompt` prompt tokens and a text."""

    def __init__(self, message: str, n_prompt: int, n_ctx: int) -> None:
        super().__init__(message)
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


class ModelError(GgufspecError):
    """A model file is missing or damaged, or is not a text-generation model."""


class VocabError(ModelError):
    """The vocabularies of target and draft have no token in common."""


class OutOfMemoryError(GgufspecError):
    """A model or its context does not fit into memory."""


class DecodeError(GgufspecError):
    """llama.cpp failed to decode a batch."""


class ConstraintError(DecodeError):
    """No continuation of a text satisfies its grammar, schema, regular expression or logit_bias."""


class NoRoomError(DecodeError):
    """A text does not fit into the draft model's context; the drafter then ends its draft."""


class DownloadError(GgufspecError):
    """A download failed: the file is missing, refused or damaged, or the hub is unreachable."""


class ClusterError(GgufspecError):
    """A Ray cluster is missing, or cannot run the workers."""


class RpcError(GgufspecError):
    """An RPC server is missing, in use, or not a compatible llama.cpp server."""


class SessionError(GgufspecError):
    """A saved session is missing, damaged, or made with another model, cache type or version."""


class LibraryError(GgufspecError, ImportError):
    """llama.cpp's library cannot be loaded: it or one of its dependencies is missing."""


class CacheError(GgufspecError):
    """A file cannot be written: a folder, its permissions or the disk prevent it."""


class ClosedError(GgufspecError):
    """An engine, model or other object was used after it was closed."""
