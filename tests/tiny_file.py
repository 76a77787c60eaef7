"""Draws random tensors by their names, and writes tiny GGUF files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tiny_vocab import Vocab

F32 = npt.NDArray[np.float32]
Tensors = dict[str, F32]
Header = Mapping[str, Any]  # a value of None: the file does not have this key
Template = str | list[dict[str, str]] | None

N_HEAD, N_HEAD_KV = 4, 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SSM = {"ssm.state_size": 8, "ssm.conv_kernel": 4, "ssm.time_step_rank": 4}  # of Mamba layers


@dataclass(frozen=True)
class Weights:
    """Draws tensors by name. `perturb` mixes in noise of its own, as a share of the deviation."""

    seed: int = 0
    perturb: float = 0.0

    def normal(self, name: str, *shape: int, deviation: float) -> F32:
        salt = zlib.crc32(name.encode())
        values = np.random.default_rng([self.seed, salt]).standard_normal(shape)
        if self.perturb:
            noise = np.random.default_rng([self.seed, salt, 1]).standard_normal(shape)
            values = (values + self.perturb * noise) / np.hypot(1.0, self.perturb)
        return (deviation * values).astype(np.float32)

    def matrix(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> F32:
        """Keeps the size of what it multiplies, times `gain`."""
        return self.normal(name, n_out, n_in, deviation=gain / np.sqrt(n_in))

    def matrices(self, prefix: str, **shapes: tuple[int, int, float]) -> Tensors:
        """The weights of these names behind the prefix, by (n_out, n_in, gain)."""
        return {
            (full := f"{prefix}.{name}.weight"): self.matrix(full, n_out, n_in, gain=gain)
            for name, (n_out, n_in, gain) in shapes.items()
        }

    def ends(self, vocab: Vocab, n_embd: int, sharpness: float) -> Tensors:
        """Embeddings, last norm and output matrix; logits have a deviation of `sharpness`.

        Control, unknown and padding tokens get the logit 0, which no greedy choice falls on.
        """
        output = self.matrix("output.weight", len(vocab), n_embd, gain=sharpness)
        spoken = (gguf.TokenType.NORMAL, gguf.TokenType.BYTE)
        output[[kind not in spoken for kind in vocab.types]] = 0.0
        return {
            "token_embd.weight": self.normal(
                "token_embd.weight", len(vocab), n_embd, deviation=1.0
            ),
            "output_norm.weight": np.ones(n_embd, np.float32),
            "output.weight": output,
        }

    def llama_layers(self, n_embd: int, n_layer: int) -> Tensors:
        layers = (self.llama_layer(f"blk.{layer}", n_embd) for layer in range(n_layer))
        return {name: tensor for layer in layers for name, tensor in layer.items()}

    def llama_layer(self, prefix: str, n_embd: int) -> Tensors:
        norm = norms(prefix, n_embd, "attn_norm")
        return norm | self.attention(prefix, n_embd) | self.feed_forward(prefix, n_embd)

    def attention(self, prefix: str, n_embd: int, n_head_kv: int = N_HEAD_KV) -> Tensors:
        n_kv = n_embd // N_HEAD * n_head_kv
        return self.matrices(
            prefix,
            attn_q=(n_embd, n_embd, 1.5),
            attn_k=(n_kv, n_embd, 1.5),
            attn_v=(n_kv, n_embd, 2.0),
            attn_output=(n_embd, n_embd, 2.0),
        )

    def feed_forward(self, prefix: str, n_embd: int) -> Tensors:
        return norms(prefix, n_embd, "ffn_norm") | self.matrices(
            prefix,
            ffn_gate=(2 * n_embd, n_embd, 1.0),
            ffn_up=(2 * n_embd, n_embd, 1.0),
            ffn_down=(n_embd, 2 * n_embd, 2.0),
        )

    def mamba(self, prefix: str, n_embd: int) -> Tensors:
        """A selective scan that forgets slowly, so that early tokens still show in late logits."""
        n_inner, (n_state, n_conv, n_rank) = 2 * n_embd, SSM.values()
        decay = -np.linspace(0.02, 0.5, n_state, dtype=np.float32)
        return {
            **self.matrices(
                prefix,
                ssm_in=(2 * n_inner, n_embd, 1.5),
                ssm_conv1d=(n_inner, n_conv, 2.0),
                ssm_x=(n_rank + 2 * n_state, n_inner, 2.0),
                ssm_dt=(n_inner, n_rank, 1.0),
                ssm_out=(n_embd, n_inner, 1.5),
            ),
            f"{prefix}.ssm_conv1d.bias": np.zeros(n_inner, np.float32),
            f"{prefix}.ssm_dt.bias": np.full(n_inner, -0.5, np.float32),
            f"{prefix}.ssm_a": np.tile(decay, (n_inner, 1)),
            f"{prefix}.ssm_d": np.ones(n_inner, np.float32),
        }


def norms(prefix: str, n: int, *names: str, value: float = 1.0) -> Tensors:
    return {f"{prefix}.{name}.weight": np.full(n, value, np.float32) for name in names}


def transformer(n_embd: int, n_layer: int, n_ctx_train: int) -> dict[str, Any]:
    return {
        "context_length": n_ctx_train,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": 2 * n_embd,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": n_embd // N_HEAD,
        "attention.value_length": n_embd // N_HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": n_embd // N_HEAD,
    }


def write_gguf(
    path: Path,
    architecture: str,
    facts: Header,
    vocab: Vocab | None,
    tensors: Mapping[str, npt.NDArray[Any]],
    chat_template: Template = None,
) -> Path:
    """`facts` names keys without the architecture; "general.", "ggufspec." and "adapter." whole."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny-{architecture}")
    for key, value in facts.items():
        is_whole = key.startswith(("general.", "ggufspec.", "adapter."))
        _add(writer, key if is_whole else f"{architecture}.{key}", value)
    if vocab is not None:
        _add_vocab(writer, vocab)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: list[tuple[type, Any]] = [  # a bool is an int, a float64 a float
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (np.int32, writer.add_int32),
        (np.float64, writer.add_float64),
        (float, writer.add_float32),
        (str, writer.add_string),
        (object, lambda key, value: writer.add_array(key, list(value))),
    ]
    if value is not None:
        next(add for kind, add in kinds if isinstance(value, kind))(key, value)


def _add_vocab(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    writer.add_tokenizer_model(vocab.model)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.scores is not None:
        writer.add_token_scores(vocab.scores)
    if vocab.merges is not None:
        writer.add_token_merges(vocab.merges)
    if vocab.model == "bert":
        writer.add_token_type_count(2)
    names: Header = {
        "pre": vocab.pre,
        "bos_token_id": vocab.bos,
        "eos_token_id": vocab.eos,
        "eot_token_id": vocab.eot,
        "unknown_token_id": vocab.unk,
        "seperator_token_id": vocab.sep,
        "padding_token_id": vocab.pad,
        "mask_token_id": vocab.mask,
        "add_bos_token": vocab.add_bos,
        "add_eos_token": vocab.add_eos,
    }
    for name, value in names.items():
        _add(writer, f"tokenizer.ggml.{name}", value)
