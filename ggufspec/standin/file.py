"""Plans a stand-in: a model file with the speed and memory of another model, but other text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

from ggufspec.errors import ModelError, OptionError
from ggufspec.models.gguf_file import GgufFile
from ggufspec.models.header import Header
from ggufspec.models.named_shape import header_of_name
from ggufspec.models.quantization import ARCHITECTURES
from ggufspec.models.vocabulary_overlap import letters_of_bytes
from ggufspec.standin.blocks import FLOATS, LAYOUTS
from ggufspec.standin.next_token_table import words_of
from ggufspec.standin.weights import Weights

_LAYERED = re.compile(
    r"blk\.\d+\.(attn_(norm|q|k|v|qkv|output|q_norm|k_norm|sinks)|"
    r"post_(attention|ffw)_norm|exp_probs_b|"
    r"ffn_(norm|(gate|up|down)(_exps|_shexp)?|gate_inp))\.(weight|bias)"
)
_ENDS = re.compile(
    r"(token_embd|position_embd|token_embd_norm|output_norm|output|rope_freqs)\.(weight|bias)"
)


_RECIPE = 2  # raise it when the written bytes change: stand-ins of two recipes do not agree
_LEAST_VOCABULARY = 512  # bytes and some words
_LEAST_MARGIN = 0.25  # least distance from the largest to the next logit, as a share of it
_MATRIX_TYPES = {*FLOATS, *LAYOUTS}
_VECTOR_TYPES = {"F32", "F16"}
_BOS, _EOS = 256, 257
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama_token_type
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")


def plan(like: str | Header, agreement: float = 1.0) -> GgufFile:
    """The stand-in for a model, given by its header or by a name that `header_of_name` takes.

    An MTP head in the model's file is left out. `agreement`: the share of tokens whose successor is
    that of the table, which all stand-ins of a vocabulary share. It is 1.0 for a target; for a
    draft, it is the acceptance rate of a drafted token if the tokens before it were accepted.
    Raises ModelError for a model that is not supported, OptionError for an agreement outside 0 to
    1.
    """
    if not 0 <= agreement <= 1:
        raise OptionError(f"agreement is {agreement}; it must be from 0 to 1")
    of = _without_mtp(header_of_name(like) if isinstance(like, str) else like)
    if of.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{of.name} has the architecture {of.architecture}, which stand-ins do not support; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    n_vocab = of.tensor("token_embd.weight").shape[1]
    _check(of, n_vocab)
    file_type = of.values.get("general.file_type")
    own = {key: value for key, value in of.values.items() if key.startswith(f"{of.architecture}.")}
    values = {
        "general.architecture": of.architecture,
        "general.name": f"stand-in for {of.name}: shape only, the text means nothing",
        "general.file_type": file_type if isinstance(file_type, int) else 0,
        "general.quantization_version": 2,
        "ggufspec.standin.recipe": _RECIPE,
        "ggufspec.standin.like": of.name,
        "ggufspec.standin.agreement": float(agreement),
        **{key: value for key, value in own.items() if value is not None},
        **_vocabulary_values(n_vocab),
    }
    return GgufFile(values, of.tensors, lambda: Weights(of, agreement).data())


def _without_mtp(of: Header) -> Header:
    left_out = of.mtp_layers
    if not left_out:
        return of
    own = {f"{of.architecture}.block_count": left_out.start}
    own[f"{of.architecture}.nextn_predict_layers"] = 0
    kept = tuple(tensor for tensor in of.tensors if tensor.layer not in left_out)
    return replace(of, values={**of.values, **own}, tensors=kept)


def _check(of: Header, n_vocab: int) -> None:
    """Raise ModelError for tensors that stand-ins do not support."""
    if of.is_tied and any("_exps" in tensor.name for tensor in of.tensors):
        raise ModelError(
            f"{of.name} is a mixture of experts whose output matrix is its embedding, which "
            "stand-ins do not support"
        )
    for tensor in of.tensors:
        if not (_LAYERED.fullmatch(tensor.name) or _ENDS.fullmatch(tensor.name)):
            raise ModelError(f"{of.name} has {tensor.name}, which stand-ins do not support")
        types = _MATRIX_TYPES if len(tensor.shape) > 1 else _VECTOR_TYPES
        if tensor.name.endswith("ffn_gate_inp.weight"):
            types = set(FLOATS)
        if tensor.type not in types:
            raise ModelError(
                f"{of.name} has {tensor.name} in {tensor.type}, which stand-ins do not support; "
                f"supported are {', '.join(sorted(types))}"
            )
    if n_vocab < _LEAST_VOCABULARY:
        raise ModelError(f"{of.name} has {n_vocab} tokens; at least {_LEAST_VOCABULARY} are needed")
    n_embd = of.number("embedding_length")
    width = n_embd // (2 if of.is_tied else 1)
    if 1 - math.sqrt(2 * math.log(n_vocab) / width) < _LEAST_MARGIN:
        raise ModelError(f"{of.name} is {n_embd} wide, too narrow to tell {n_vocab:,} tokens apart")


def _vocabulary_values(n_vocab: int) -> dict[str, Any]:
    """Metadata of a tokenizer with single bytes, begin and end of text, made-up words, padding."""
    words = words_of(n_vocab)
    kinds = [_NORMAL] * words.stop + [_UNUSED] * (n_vocab - words.stop)
    kinds[_BOS] = kinds[_EOS] = _CONTROL
    padding = (b"[PAD%d]" % i for i in range(words.stop, n_vocab))
    letters = map(str.encode, letters_of_bytes())
    tokens = [*letters, b"<s>", b"</s>", *islice(_made_up_words(), len(words)), *padding]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": _BOS,
        "tokenizer.ggml.eos_token_id": _EOS,
        "tokenizer.ggml.add_bos_token": True,
    }


def _made_up_words() -> Iterator[bytes]:
    """All words of three syllables, the first syllable changing fastest; then all words of four."""
    for n in (3, 4):
        for syllables in product(_SYLLABLES, repeat=n):
            yield ("Ġ" + "".join(syllables[::-1])).encode()  # Ġ: a space
