"""Writes tiny random GGUF files that llama.cpp loads in milliseconds, so tests need no download.

It knows which header keys and tensors llama.cpp asks of each architecture, and no more: the weights
mean nothing, except in the two scripted models, which write a text that the test chooses. Every
tensor is drawn from its own generator, seeded by (seed, tensor name); hence models that share a
seed share every tensor that they have in common, and a model with fewer layers is an early exit of
its bigger sibling: a draft that agrees now and then.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Header = Mapping[str, "int | float | bool | str | Sequence[int] | None"]

WORDS = (" the", " of", " and", " hello", " world", " model", " stop", " end", " say", "ing")
PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
N_HEAD, N_HEAD_KV = 4, 2

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Vocabularies


@dataclass(frozen=True)
class Vocab:
    """The tokenizer section of a GGUF file. A field that is None is left out of the file.

    llama.cpp takes a token for end-of-generation if it is `eos` or `eot`, and also if its text is
    one of those that it knows (`</s>`, `<|im_end|>`, `<|eot_id|>`, `<|endoftext|>` ...).
    """

    model: str  # "llama" (SPM), "gpt2" (byte-level BPE), "bert" (WordPiece)
    tokens: tuple[str, ...]  # as stored: with `▁`, `Ġ`, `<0xC3>`
    types: tuple[int, ...]  # gguf.TokenType
    scores: tuple[float, ...] | None = None
    merges: tuple[str, ...] | None = None
    pre: str | None = None
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def id_of(self, token: str) -> int:
        """The id of a token by its stored text, such as `<|im_end|>` or `▁hello`."""
        return self.tokens.index(token)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text; nothing for control tokens and padding."""
        text, kind = self.tokens[token_id], self.types[token_id]
        if kind == gguf.TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != gguf.TokenType.NORMAL:
            return text.encode() if kind == gguf.TokenType.USER_DEFINED else b""
        if self.model == "gpt2":
            return bytes(_BPE_BYTES[char] for char in text)
        return text.replace("▁", " ").encode()

    def text_of(self, token_ids: Iterable[int]) -> str:
        return b"".join(map(self.bytes_of, token_ids)).decode(errors="replace")

    def spell(self, text: str) -> list[int]:
        """Ids that write `text`, longest token first: for scripts, not what the tokenizer does.

        Whatever is not ASCII comes out as byte tokens, so characters are split over tokens.
        """
        by_bytes: dict[bytes, int] = {}
        for token_id in range(len(self)):
            by_bytes.setdefault(self.bytes_of(token_id), token_id)
        longest = max(map(len, by_bytes))
        rest, token_ids = text.encode(), []
        while rest:
            length = next(n for n in range(longest, 0, -1) if rest[:n] in by_bytes)
            token_ids.append(by_bytes[rest[:length]])
            rest = rest[length:]
        return token_ids

    def with_token(self, text: str, kind: gguf.TokenType = gguf.TokenType.NORMAL) -> Vocab:
        """One more token at the end, id `len(self)`; no merge leads to a normal one."""
        return dataclasses.replace(
            self,
            tokens=(*self.tokens, text),
            types=(*self.types, int(kind)),
            scores=None if self.scores is None else (*self.scores, -1000.0),
        )

    def with_text(self, token_id: int, text: str) -> Vocab:
        """The same vocabulary, but one token reads differently."""
        tokens = list(self.tokens)
        tokens[token_id] = text
        return dataclasses.replace(self, tokens=tuple(tokens))

    def with_size(self, n_vocab: int) -> Vocab:
        """Grown to `n_vocab` by unused padding tokens `[PAD400]`, or cut short at the end."""
        vocab = self
        for token_id in range(len(self), n_vocab):
            vocab = vocab.with_token(f"[PAD{token_id}]", gguf.TokenType.UNUSED)
        return dataclasses.replace(
            vocab,
            tokens=vocab.tokens[:n_vocab],
            types=vocab.types[:n_vocab],
            scores=None if vocab.scores is None else vocab.scores[:n_vocab],
        )


def spm_vocab(
    *,
    control: Sequence[str] = (),
    words: Sequence[str] = WORDS,
    bos: str = "<s>",
    eos: str = "</s>",
    eot: str | None = None,
    add_bos: bool | None = True,
) -> Vocab:
    """A SentencePiece vocabulary: `<unk> <s> </s>`, 256 bytes, printable ASCII, words, control.

    `bos`, `eos` and `eot` name any token by its stored text; `control` adds control tokens.
    """
    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", *PRINTABLE, *(piece.replace(" ", "▁") for piece in _prefixes(words))]
    tokens = (*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *control)
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256]
    types += [kind.NORMAL] * len(pieces) + [kind.CONTROL] * len(control)
    ranks = [-float(rank) for rank in range(len(pieces))]
    return Vocab(
        model="llama",
        pre="default",
        tokens=tokens,
        types=tuple(map(int, types)),
        scores=(*[0.0] * 259, *ranks, *[0.0] * len(control)),
        bos=tokens.index(bos),
        eos=tokens.index(eos),
        eot=None if eot is None else tokens.index(eot),
        unk=0,
        add_bos=add_bos,
        add_eos=False,
    )


def bpe_vocab(
    *,
    control: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    words: Sequence[str] = WORDS,
    bos: str | None = "<|endoftext|>",
    eos: str = "<|im_end|>",
    eot: str | None = None,
    add_bos: bool | None = False,
    pre: str = "gpt-2",
) -> Vocab:
    """A byte-level BPE vocabulary: 256 bytes, words with the merges that lead to them, control."""
    pieces = [_bpe_text(piece) for piece in _prefixes(words)]
    tokens = (*_BPE_BYTES, *pieces, *control)
    return Vocab(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=(1,) * (256 + len(pieces)) + (int(gguf.TokenType.CONTROL),) * len(control),
        merges=tuple(f"{piece[:-1]} {piece[-1]}" for piece in pieces),
        bos=None if bos is None else tokens.index(bos),
        eos=tokens.index(eos),
        eot=None if eot is None else tokens.index(eot),
        add_bos=add_bos,
        add_eos=False,
    )


def wordpiece_vocab() -> Vocab:
    """The vocabulary of embedding models: `[CLS]`, `[SEP]`, letters that start or continue."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokens = (*special, *(f"▁{char}" for char in PRINTABLE), *PRINTABLE)
    types = (int(gguf.TokenType.CONTROL),) * 5 + (1,) * (2 * len(PRINTABLE))
    return Vocab("bert", tokens, types, pad=0, unk=1, bos=2, sep=3)


def _prefixes(words: Sequence[str]) -> list[str]:
    """Every prefix of two or more characters, so that merging from the left reaches each word."""
    return list(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))


def _bpe_alphabet() -> dict[str, int]:
    """The byte that each of the 256 characters of byte-level BPE stands for.

    Printable Latin-1 stands for itself, the others for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
    return {chars[byte]: byte for byte in range(256)}


_BPE_BYTES = _bpe_alphabet()


def _bpe_text(text: str) -> str:
    alphabet = list(_BPE_BYTES)
    return "".join(alphabet[byte] for byte in text.encode())


SPM = spm_vocab()
BPE = bpe_vocab()
SILENT = dataclasses.replace(BPE, types=(int(gguf.TokenType.UNUSED),) * len(BPE))  # no text


# Random weights


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

    def ends(self, vocab: Vocab, n_embd: int, sharpness: float) -> dict[str, F32]:
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

    def llama_layers(self, n_embd: int, n_layer: int) -> dict[str, F32]:
        tensors: dict[str, F32] = {}
        for layer in range(n_layer):
            prefix = f"blk.{layer}"
            tensors[f"{prefix}.attn_norm.weight"] = np.ones(n_embd, np.float32)
            tensors |= self.attention(prefix, n_embd)
            tensors |= self.feed_forward(prefix, n_embd, 2 * n_embd)
        return tensors

    def attention(self, prefix: str, n_embd: int, n_head_kv: int = N_HEAD_KV) -> dict[str, F32]:
        n_kv = n_embd // N_HEAD * n_head_kv
        shapes = {"q": (n_embd, n_embd), "k": (n_kv, n_embd), "v": (n_kv, n_embd)}
        names = {name: f"{prefix}.attn_{name}.weight" for name in [*shapes, "output"]}
        return {
            names["q"]: self.matrix(names["q"], *shapes["q"], gain=1.5),
            names["k"]: self.matrix(names["k"], *shapes["k"], gain=1.5),
            names["v"]: self.matrix(names["v"], *shapes["v"], gain=2.0),
            names["output"]: self.matrix(names["output"], n_embd, n_embd, gain=2.0),
        }

    def feed_forward(self, prefix: str, n_embd: int, n_ff: int) -> dict[str, F32]:
        gate, up, down = (f"{prefix}.ffn_{name}.weight" for name in ("gate", "up", "down"))
        return {
            f"{prefix}.ffn_norm.weight": np.ones(n_embd, np.float32),
            gate: self.matrix(gate, n_ff, n_embd),
            up: self.matrix(up, n_ff, n_embd),
            down: self.matrix(down, n_embd, n_ff, gain=2.0),
        }

    def mamba(self, prefix: str, n_embd: int, sizes: SSM) -> dict[str, F32]:
        """A selective scan that forgets slowly, so that early tokens still show in late logits."""
        n_inner = sizes.n_inner
        into, x, dt, out, conv = (
            f"{prefix}.ssm_{name}.weight" for name in ("in", "x", "dt", "out", "conv1d")
        )
        decay = -np.linspace(0.02, 0.5, sizes.n_state, dtype=np.float32)
        return {
            into: self.matrix(into, 2 * n_inner, n_embd, gain=1.5),
            conv: self.matrix(conv, n_inner, sizes.n_conv, gain=2.0),
            f"{prefix}.ssm_conv1d.bias": np.zeros(n_inner, np.float32),
            x: self.matrix(x, sizes.dt_rank + 2 * sizes.n_state, n_inner, gain=2.0),
            dt: self.matrix(dt, n_inner, sizes.dt_rank),
            f"{prefix}.ssm_dt.bias": np.full(n_inner, -0.5, np.float32),
            f"{prefix}.ssm_a": np.tile(decay, (n_inner, 1)),
            f"{prefix}.ssm_d": np.ones(n_inner, np.float32),
            out: self.matrix(out, n_embd, n_inner, gain=1.5),
        }


@dataclass(frozen=True)
class SSM:
    """The sizes of a Mamba layer; llama.cpp takes only n_inner = 2 n_embd."""

    n_inner: int
    n_state: int = 8
    n_conv: int = 4
    dt_rank: int = 4

    @property
    def header(self) -> dict[str, int]:
        return {
            "ssm.conv_kernel": self.n_conv,
            "ssm.inner_size": self.n_inner,
            "ssm.state_size": self.n_state,
            "ssm.time_step_rank": self.dt_rank,
        }


# Models that decode


def write_llama(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_embd: int = 32,
    n_layer: int = 2,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
    chat_template: str | list[dict[str, str]] | None = None,
    header: Header | None = None,
) -> Path:
    """A Llama with random weights. `header` overrides or, with None, removes header keys.

    `header` names keys without the architecture, as in {"embedding_length": 0}.
    """
    weights = Weights(seed, perturb)
    tensors = weights.ends(vocab, n_embd, sharpness) | weights.llama_layers(n_embd, n_layer)
    facts = {**transformer(n_embd, n_layer, n_ctx_train), "vocab_size": len(vocab)}
    return write_gguf(path, "llama", {**facts, **(header or {})}, vocab, tensors, chat_template)


def write_swa(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_window: int = 16,
    n_layer: int = 2,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
) -> Path:
    """A Gemma 3: every second layer sees all tokens, the others the last `n_window`."""
    n_embd = 32
    weights = Weights(seed, perturb)
    tensors = weights.ends(vocab, n_embd, sharpness)
    tensors["token_embd.weight"] /= np.float32(np.sqrt(n_embd))  # Gemma multiplies by that
    ones = np.ones(n_embd, np.float32)
    for layer in range(n_layer):
        prefix = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "post_ffw_norm"):
            tensors[f"{prefix}.{norm}.weight"] = ones
        for norm in ("attn_q_norm", "attn_k_norm"):
            tensors[f"{prefix}.{norm}.weight"] = np.full(n_embd // N_HEAD, 1.5, np.float32)
        tensors |= weights.attention(prefix, n_embd)
        tensors |= weights.feed_forward(prefix, n_embd, 2 * n_embd)
    facts = {
        **transformer(n_embd, n_layer, n_ctx_train),
        "attention.sliding_window": n_window,
        "attention.sliding_window_pattern": 2,
    }
    return write_gguf(path, "gemma3", facts, vocab, tensors)


def write_moe(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_embd: int = 32,
    n_layer: int = 2,
    n_experts: int = 16,
    n_used: int = 2,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
    chat_template: str | list[dict[str, str]] | None = None,
    header: Header | None = None,
) -> Path:
    """A mixture of experts, a Qwen 3, with random weights. Each token has experts of its own."""
    weights, n_ff = Weights(seed, perturb), n_embd // 2
    tensors = weights.ends(vocab, n_embd, sharpness)
    for layer in range(n_layer):
        prefix = f"blk.{layer}"
        for norm in ("attn", "ffn"):
            tensors[f"{prefix}.{norm}_norm.weight"] = np.ones(n_embd, np.float32)
        for norm in ("q", "k"):
            tensors[f"{prefix}.attn_{norm}_norm.weight"] = np.ones(n_embd // N_HEAD, np.float32)
        tensors |= weights.attention(prefix, n_embd)
        shapes = {
            "ffn_gate_inp": (n_experts, n_embd),
            "ffn_gate_exps": (n_experts, n_ff, n_embd),
            "ffn_up_exps": (n_experts, n_ff, n_embd),
            "ffn_down_exps": (n_experts, n_embd, n_ff),
        }
        for name, shape in shapes.items():
            name = f"{prefix}.{name}.weight"
            tensors[name] = weights.normal(name, *shape, deviation=2 / np.sqrt(shape[-1]))
    facts = {
        **transformer(n_embd, n_layer, n_ctx_train),
        "expert_count": n_experts,
        "expert_used_count": n_used,
        "expert_feed_forward_length": n_ff,
        **(header or {}),
    }
    return write_gguf(path, "qwen3moe", facts, vocab, tensors, chat_template)


def write_mamba(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_embd: int = 32,
    n_layer: int = 2,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
) -> Path:
    """A recurrent model: its memory is a state, from which no tail can be dropped."""
    weights, sizes = Weights(seed, perturb), SSM(n_inner=2 * n_embd)
    tensors = weights.ends(vocab, n_embd, sharpness)
    for layer in range(n_layer):
        prefix = f"blk.{layer}"
        tensors[f"{prefix}.attn_norm.weight"] = np.ones(n_embd, np.float32)
        tensors |= weights.mamba(prefix, n_embd, sizes)
    facts: Header = {
        "context_length": n_ctx_train,
        "embedding_length": n_embd,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": n_layer,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **sizes.header,
    }
    return write_gguf(path, "mamba", facts, vocab, tensors)


def write_rwkv(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
) -> Path:
    """An RWKV 7 of one layer: recurrent like Mamba, by another kind of state."""
    weights = Weights(seed, perturb)
    n_embd, n_rank, prefix = 64, 8, "blk.0"  # one head: kernels want 64 wide ones
    tensors = weights.ends(vocab, n_embd, sharpness)
    tensors["output_norm.bias"] = np.zeros(n_embd, np.float32)
    for norm in ("token_embd_norm", *(f"{prefix}.{n}" for n in ("attn_norm", "attn_norm_2"))):
        tensors[f"{norm}.weight"] = np.ones(n_embd, np.float32)
        tensors[f"{norm}.bias"] = np.zeros(n_embd, np.float32)
    for gate in "wavg":  # of decay, learning rate, value, output
        into, out = (f"{prefix}.time_mix_{gate}{rank}.weight" for rank in (1, 2))
        tensors[into] = weights.matrix(into, n_rank, n_embd)
        tensors[out] = weights.matrix(out, n_embd, n_rank)
        tensors[f"{prefix}.time_mix_{gate}0.weight"] = np.full(n_embd, -2.0, np.float32)
    del tensors[f"{prefix}.time_mix_g0.weight"]
    for name in ("key", "value", "receptance", "output"):
        name = f"{prefix}.time_mix_{name}.weight"
        tensors[name] = weights.matrix(name, n_embd, n_embd, gain=2.0)
    for name in ("k_k", "k_a", "r_k", "ln"):
        tensors[f"{prefix}.time_mix_{name}.weight"] = np.full(n_embd, 0.5, np.float32)
    tensors[f"{prefix}.time_mix_ln.bias"] = np.zeros(n_embd, np.float32)
    tensors[f"{prefix}.time_mix_lerp_fused.weight"] = np.full((6, 1, 1, n_embd), 0.5, np.float32)
    tensors[f"{prefix}.channel_mix_lerp_k.weight"] = np.full((1, 1, n_embd), 0.5, np.float32)
    up, down = (f"{prefix}.channel_mix_{name}.weight" for name in ("key", "value"))
    tensors[up] = weights.matrix(up, n_embd, n_embd)
    tensors[down] = weights.matrix(down, n_embd, n_embd)
    facts: Header = {
        "context_length": n_ctx_train,
        "embedding_length": n_embd,
        "block_count": 1,
        "feed_forward_length": n_embd,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": n_embd,
        "attention.decay_lora_rank": n_rank,
        "attention.iclr_lora_rank": n_rank,
        "attention.value_residual_mix_lora_rank": n_rank,
        "attention.gate_lora_rank": n_rank,
        "token_shift_count": 2,
    }
    return write_gguf(path, "rwkv7", facts, vocab, tensors)


def write_hybrid(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_embd: int = 32,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
) -> Path:
    """A Jamba of three layers: state, attention, state."""
    weights, sizes = Weights(seed, perturb), SSM(n_inner=2 * n_embd)
    n_head_kv = [0, N_HEAD_KV, 0]  # none: a state instead of attention
    tensors = weights.ends(vocab, n_embd, sharpness)
    for layer, n_heads in enumerate(n_head_kv):
        prefix = f"blk.{layer}"
        tensors[f"{prefix}.attn_norm.weight"] = np.ones(n_embd, np.float32)
        tensors |= weights.feed_forward(prefix, n_embd, 2 * n_embd)
        if n_heads:
            tensors |= weights.attention(prefix, n_embd, n_heads)
            continue
        tensors |= weights.mamba(prefix, n_embd, sizes)
        for norm, size in (("dt", sizes.dt_rank), ("b", sizes.n_state), ("c", sizes.n_state)):
            tensors[f"{prefix}.ssm_{norm}_norm.weight"] = np.ones(size, np.float32)
    facts = {
        **transformer(n_embd, len(n_head_kv), n_ctx_train),
        "attention.head_count_kv": n_head_kv,
        **sizes.header,
    }
    return write_gguf(path, "jamba", facts, vocab, tensors)


def write_qwen35(
    path: Path,
    *,
    seed: int = 0,
    perturb: float = 0.0,
    n_embd: int = 32,
    n_ctx_train: int = 256,
    vocab: Vocab = SPM,
    sharpness: float = 3.0,
) -> Path:
    """A Qwen 3.5 of three layers: state, attention, state. llama.cpp can roll its states back."""
    weights = Weights(seed, perturb)
    n_state, n_keys, n_values = 16, 2, 4  # heads of keys and of values, each of n_state numbers
    n_inner = n_values * n_state
    n_conv = n_inner + 2 * n_keys * n_state
    tensors = weights.ends(vocab, n_embd, sharpness)
    for layer in range(3):
        prefix = f"blk.{layer}"
        tensors |= weights.feed_forward(prefix, n_embd, 2 * n_embd)
        tensors[f"{prefix}.post_attention_norm.weight"] = tensors.pop(f"{prefix}.ffn_norm.weight")
        tensors[f"{prefix}.attn_norm.weight"] = np.ones(n_embd, np.float32)
        if layer == 1:
            tensors |= weights.attention(prefix, n_embd)
            q = f"{prefix}.attn_q.weight"
            tensors[q] = weights.matrix(q, 2 * n_embd, n_embd, gain=1.5)  # queries, and gates
            for name in ("q", "k"):
                tensors[f"{prefix}.attn_{name}_norm.weight"] = np.ones(n_embd // N_HEAD, np.float32)
            continue
        shapes = {
            "attn_qkv": (n_conv, n_embd),
            "attn_gate": (n_inner, n_embd),
            "ssm_conv1d": (n_conv, 4),
            "ssm_alpha": (n_values, n_embd),
            "ssm_beta": (n_values, n_embd),
            "ssm_out": (n_embd, n_inner),
        }
        for name, shape in shapes.items():
            name = f"{prefix}.{name}.weight"
            tensors[name] = weights.matrix(name, *shape, gain=1.5)
        tensors[f"{prefix}.ssm_norm.weight"] = np.ones(n_state, np.float32)
        tensors[f"{prefix}.ssm_dt.bias"] = np.zeros(n_values, np.float32)
        tensors[f"{prefix}.ssm_a"] = -np.linspace(0.02, 0.3, n_values, dtype=np.float32)
    facts = {
        **transformer(n_embd, 3, n_ctx_train),
        "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": n_inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_values,
        "ssm.group_count": n_keys,
    }
    return write_gguf(path, "qwen35", facts, vocab, tensors)


# Models that write a known text


def write_scripted(
    path: Path,
    token_ids: Sequence[int],
    *,
    then: int | None = None,
    vocab: Vocab = SPM,
    gap: float = 20.0,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
) -> Path:
    """A Llama whose next token depends on the last one only, and is `gap` logits ahead of all.

    After a token of the script comes the next of the script; after its last one comes `then`, or
    else the first; after any other token comes the first. So every prompt that ends outside of the
    script is answered by the script. Raises ValueError if a token would have two successors;
    `write_timed` has no such limit.
    """
    following: dict[int, int] = {}
    for token, after in zip(token_ids, [*token_ids[1:], then], strict=True):
        wanted = token_ids[0] if after is None else after
        if following.setdefault(token, wanted) != wanted:
            raise ValueError(f"token {token} has two successors in the script: use write_timed")
    nexts = [following.get(token, token_ids[0]) for token in range(len(vocab))]
    embeddings, output = _one_hot(nexts, len(vocab))
    n_embd = embeddings.shape[1]
    tensors = {
        "token_embd.weight": embeddings,
        "output_norm.weight": np.ones(n_embd, np.float32),
        "output.weight": output * np.float32(gap / np.sqrt(n_embd)),
        **Weights().llama_layers(n_embd, 1),
    }
    for silenced in ("blk.0.attn_output.weight", "blk.0.ffn_down.weight"):
        tensors[silenced] = np.zeros_like(tensors[silenced])
    facts = transformer(n_embd, 1, n_ctx_train)
    return write_gguf(path, "llama", facts, vocab, tensors, chat_template)


def write_timed(
    path: Path,
    token_ids: Sequence[int],
    *,
    n_prompt: int = 0,
    vocab: Vocab = SPM,
    gap: float = 20.0,
    n_ctx_train: int = 256,
    chat_template: str | None = None,
) -> Path:
    """A GPT-2 whose next token depends on the position only, and is `gap` logits ahead of all.

    Whatever stands before, the token at position `n_prompt + i` is `token_ids[i % len]`: after a
    prompt of `n_prompt` tokens it writes the script, over and over. Tokens may repeat, and another
    script with one id changed is a draft that is refused at exactly that place.
    """
    nexts = [token_ids[(pos + 1 - n_prompt) % len(token_ids)] for pos in range(n_ctx_train)]
    positions, output = _one_hot(nexts, len(vocab))
    n_embd = positions.shape[1]
    layer_shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,),
        "attn_qkv": (3 * n_embd, n_embd),
        "attn_output": (n_embd, n_embd),
        "ffn_norm": (n_embd,),
        "ffn_up": (2 * n_embd, n_embd),
        "ffn_down": (n_embd, 2 * n_embd),
    }
    tensors = {
        "token_embd.weight": np.zeros((len(vocab), n_embd), np.float32),
        "position_embd.weight": positions,
        "output_norm.weight": np.ones(n_embd, np.float32),
        "output_norm.bias": np.zeros(n_embd, np.float32),
        "output.weight": output * np.float32(gap / np.sqrt(n_embd - 1)),
    }
    for name, shape in layer_shapes.items():
        tensors[f"blk.0.{name}.weight"] = np.zeros(shape, np.float32)
        tensors[f"blk.0.{name}.bias"] = np.zeros(shape[0], np.float32)
    facts = {
        **transformer(n_embd, 1, n_ctx_train),
        "attention.head_count_kv": N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
    }
    return write_gguf(path, "gpt2", facts, vocab, tensors, chat_template)


def _one_hot(nexts: Sequence[int], n_vocab: int) -> tuple[F32, F32]:
    """Rows that name the next token by one dimension, and the output matrix that reads it."""
    dimensions = {token: index for index, token in enumerate(dict.fromkeys(nexts))}
    n_embd = -(-max(32, len(dimensions)) // 32) * 32
    rows = np.zeros((len(nexts), n_embd), np.float32)
    rows[np.arange(len(nexts)), [dimensions[token] for token in nexts]] = 1.0
    output = np.zeros((n_vocab, n_embd), np.float32)
    output[list(dimensions), list(dimensions.values())] = 1.0
    return rows, output


# Files that are no language model


def write_bert(path: Path, *, seed: int = 0, n_embd: int = 32, n_ctx_train: int = 64) -> Path:
    """An embedding model: looks both ways, keeps no memory, writes no logits."""
    weights, vocab = Weights(seed), wordpiece_vocab()
    tensors = {
        "token_embd.weight": weights.normal("token", len(vocab), n_embd, deviation=1.0),
        "position_embd.weight": weights.normal("position", n_ctx_train, n_embd, deviation=1.0),
        "token_types.weight": weights.normal("types", 2, n_embd, deviation=1.0),
        "blk.0.ffn_up.weight": weights.matrix("up", 2 * n_embd, n_embd),
        "blk.0.ffn_down.weight": weights.matrix("down", n_embd, 2 * n_embd),
        **weights.attention("blk.0", n_embd, N_HEAD),
    }
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        tensors[f"{norm}.weight"] = np.ones(n_embd, np.float32)
        tensors[f"{norm}.bias"] = np.zeros(n_embd, np.float32)
    facts = {
        **transformer(n_embd, 1, n_ctx_train),
        "attention.head_count_kv": N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "pooling_type": int(gguf.PoolingType.MEAN),
    }
    return write_gguf(path, "bert", facts, vocab, tensors)


def write_t5_encoder_decoder(
    path: Path, *, seed: int = 0, n_embd: int = 32, vocab: Vocab = SPM, sharpness: float = 3.0
) -> Path:
    """A T5: an encoder must run before its decoder."""
    weights = Weights(seed)
    tensors = weights.ends(vocab, n_embd, sharpness)
    tensors["dec.output_norm.weight"] = tensors.pop("output_norm.weight")
    tensors["enc.output_norm.weight"] = np.ones(n_embd, np.float32)
    buckets = 32
    for side, attentions in (("enc", ["attn"]), ("dec", ["attn", "cross_attn"])):
        for attention in attentions:
            prefix = f"{side}.blk.0.{attention}"
            tensors[f"{prefix}_norm.weight"] = np.ones(n_embd, np.float32)
            for name in ("q", "k", "v", "o"):
                tensors[f"{prefix}_{name}.weight"] = weights.matrix(prefix + name, n_embd, n_embd)
        tensors[f"{side}.blk.0.attn_rel_b.weight"] = weights.normal(
            side, buckets, N_HEAD, deviation=1.0
        )
        tensors |= weights.feed_forward(f"{side}.blk.0", n_embd, 2 * n_embd)
    facts = {
        **transformer(n_embd, 1, 256),
        "attention.head_count_kv": N_HEAD,
        "attention.relative_buckets_count": buckets,
        "decoder_start_token_id": 1,
    }
    return write_gguf(path, "t5", facts, vocab, tensors)


def write_vocab_only(path: Path, *, vocab: Vocab = SPM) -> Path:
    """A Llama's whole header and tokenizer, and not one tensor."""
    return write_gguf(path, "llama", transformer(32, 2, 256), vocab, {})


def write_without_tokenizer(path: Path) -> Path:
    """A Llama with all its tensors and no word on its tokens."""
    n_embd, n_layer = 32, 2
    weights = Weights()
    tensors = weights.ends(SPM, n_embd, 1.0) | weights.llama_layers(n_embd, n_layer)
    return write_gguf(path, "llama", transformer(n_embd, n_layer, 256), None, tensors)


def truncate(path: Path, fraction: float) -> Path:
    """Cuts the file in place, as a broken download would; keeps that fraction of its bytes."""
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * fraction))
    return path


# Into the file


def transformer(n_embd: int, n_layer: int, n_ctx_train: int) -> dict[str, int | float]:
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
    chat_template: str | list[dict[str, str]] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny-{architecture}")
    for key, value in facts.items():
        is_whole = key.startswith(("general.", "ggufspec."))
        _add(writer, key if is_whole else f"{architecture}.{key}", value)
    if vocab is not None:
        _add_vocab(writer, vocab)
    if vocab is not None and vocab.model == "bert":
        writer.add_token_type_count(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(
    writer: gguf.GGUFWriter, key: str, value: int | float | bool | str | Sequence[int] | None
) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, list(value))


def _add_vocab(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    writer.add_tokenizer_model(vocab.model)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.scores is not None:
        writer.add_token_scores(vocab.scores)
    if vocab.merges is not None:
        writer.add_token_merges(vocab.merges)
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
