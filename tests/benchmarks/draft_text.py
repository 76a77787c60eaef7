"""The target of `eagle3` and `dflash` in torch, the prompts, and the texts that it writes."""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

try:
    torch: Any = import_module("torch")
    F: Any = import_module("torch.nn.functional")
except ModuleNotFoundError:  # the trainings say what to do
    torch = F = None

Tensor = Any
LENGTH = 352  # of a text in tokens, with its prompt
_N_AT_ONCE = 128  # texts that are written together
_TEMPERATURES = (0.0, 0.7, 1.0)
_TEMPLATE = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_END = "<|im_end|>"


class Target:
    """The target in torch: matrices in bfloat16, sums along the layers in float32."""

    def __init__(self, path: Path) -> None:
        self.fields = gguf.GGUFReader(path).fields
        self.n_embd = self.value("embedding_length")
        self.n_head = self.value("attention.head_count")
        self.n_kv = self.value("attention.head_count_kv")
        self.n_head_embd = self.n_embd // self.n_head
        self.eps = self.value("attention.layer_norm_rms_epsilon")
        n_layers = self.value("block_count")
        self.feature_layers = (2, n_layers // 2, n_layers - 3)  # as in EAGLE-3
        weights = {
            tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            for tensor in gguf.GGUFReader(path).tensors
        }
        self.embeddings = weights["token_embd.weight"]
        self.output = weights.get("output.weight", self.embeddings).bfloat16()
        self.output_norm = weights["output_norm.weight"]
        self.layers = [self._layer(weights, f"blk.{i}.{{}}.weight") for i in range(n_layers)]
        base = self.value("rope.freq_base")
        half = torch.arange(0, self.n_head_embd, 2).double()
        angles = torch.arange(8192).double()[:, None] * base ** (-half / self.n_head_embd)
        self.turns = angles.cos().bfloat16(), angles.sin().bfloat16()  # of heads, by position

    def value(self, key: str) -> Any:
        """Of the header, without `llama.`."""
        return self.fields[f"llama.{key}"].contents()

    def _layer(self, weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        w = {
            key: weights[name.format(key)] for key in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        w |= {key: weights[name.format(key)] for key in ("ffn_gate", "ffn_up", "ffn_down")}
        q, k = in_halves(w["attn_q"], self.n_head), in_halves(w["attn_k"], self.n_kv)
        return {
            "attn_norm": weights[name.format("attn_norm")],
            "qkv": torch.cat((q, k, w["attn_v"])).bfloat16(),
            "attn_output": w["attn_output"].bfloat16(),
            "ffn_norm": weights[name.format("ffn_norm")],
            "gate_up": torch.cat((w["ffn_gate"], w["ffn_up"])).bfloat16(),
            "ffn_down": w["ffn_down"].bfloat16(),
        }

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.n_embd,), weight, self.eps)

    def heads(self, qkv: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values: (n_texts, n_heads, n_tokens, n_head_embd)."""
        n_texts, n_tokens, _ = qkv.shape
        cos, sin = (table[first : first + n_tokens] for table in self.turns)

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        x = qkv.view(n_texts, n_tokens, -1, self.n_head_embd).transpose(1, 2)
        q, k, v = x.split((self.n_head, self.n_kv, self.n_kv), 1)
        return rotated(q), rotated(k), v

    def decode(self, tokens: Tensor, cache: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Features of tokens at positions `first`, ..., and their last rows, after the norm.

        Features are the inputs of three layers. Several tokens are decoded at position 0 only.
        """
        n_texts, n_tokens = tokens.shape
        end, x, features = first + n_tokens, F.embedding(tokens, self.embeddings), []
        for i, layer in enumerate(self.layers):
            if i in self.feature_layers:
                features.append(x.bfloat16())
            qkv = F.linear(self.norm(x, layer["attn_norm"]).bfloat16(), layer["qkv"])
            q, k, v = self.heads(qkv, first)
            cache[i, 0, :, :, first:end], cache[i, 1, :, :, first:end] = k, v
            k, v = cache[i, :, :, :, :end]
            if (
                n_tokens == 1
            ):  # the query heads of one key head as its queries: one reading of the keys
                q = q.reshape(n_texts, self.n_kv, -1, self.n_head_embd)
                seen = F.scaled_dot_product_attention(q, k, v).reshape(n_texts, 1, -1)
            else:
                seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                seen = seen.transpose(1, 2).reshape(n_texts, n_tokens, -1)
            x = x + F.linear(seen, layer["attn_output"])
            gate, up = F.linear(self.norm(x, layer["ffn_norm"]).bfloat16(), layer["gate_up"]).chunk(
                2, -1
            )
            x = x + F.linear(F.silu(gate) * up, layer["ffn_down"])
        return torch.cat(features, -1), self.norm(x, self.output_norm).bfloat16()


def in_halves(weight: Tensor, n_heads: int) -> Tensor:
    """llama.cpp rotates neighbours of a head; these rows, the halves of a head."""
    return weight.view(n_heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def in_neighbours(weight: Tensor, n_heads: int) -> Tensor:
    return weight.view(n_heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def text(options: argparse.Namespace) -> None:
    """Write answers to made-up prompts; store each batch with its features and last rows."""
    target, until = Target(options.target), time.monotonic() + 60 * options.minutes
    vocab = llama_cpp.Llama(str(options.target), vocab_only=True, verbose=False)
    end = vocab.tokenize(_END.encode(), add_bos=False, special=True)[0]
    written = (vocab.tokenize(p.encode(), add_bos=False, special=True) for p in prompts())
    tokenized = [tokens for tokens in written if len(tokens) < LENGTH - 112]
    options.folder.mkdir(parents=True, exist_ok=True)
    n_tokens, began = 0, time.monotonic()
    for i in range(0, len(tokenized), _N_AT_ONCE):
        path = options.folder / f"{i:05d}.pt"
        if path.exists() or time.monotonic() > until:
            continue
        with torch.inference_mode():
            batch = write_texts(target, tokenized[i : i + _N_AT_ONCE], end)
        torch.save(batch, path)
        n_tokens += int((batch["ends"] - batch["begins"]).sum())
        pace = n_tokens / (time.monotonic() - began)
        sys.stdout.write(f"{path}: {n_tokens} tokens, {pace:.0f} tokens/s\n")


def prompts() -> list[str]:
    """Chat prompts of six kinds, in mixed order; code and passages are of Python's own library."""
    made = json.loads((Path(__file__).parent / "data" / "draft_prompts.json").read_text())
    rng, texts = random.Random(1), []
    for topic in made["topics"]:
        for task in rng.sample(made["topic_tasks"], 16):
            texts.append(task.format(t=topic, u=rng.choice(made["topics"])))
    for _ in range(600):
        numbers = {"x": rng.randint(3, 48), "y": rng.randint(5, 60), "z": rng.randint(2, 12)}
        texts.append(rng.choice(made["sums"]).format(a=rng.choice(made["names"]), **numbers))
    texts += [task.format(c=does) for does in made["functions"] for task in made["code_tasks"]]
    for code, head in rng.sample(sorted(_functions()), 700):
        if rng.random() < 0.5:
            texts.append(f"{made['complete']}\n```python\n{head}\n```")
        else:
            texts.append(f"{rng.choice(made['edits'])}\n```python\n{code}\n```")
    for passage in rng.sample(sorted(_passages()), 350):
        texts.append(rng.choice(made["passages"]).format(passage))
    rng.shuffle(texts)
    return [_TEMPLATE.format(made["system"], text) for text in texts]


def _functions() -> Iterator[tuple[str, str]]:
    """Functions of the standard library: the code, and its lines up to the end of the docstring."""
    for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.parse(source).body:
            code = ast.get_source_segment(source, node) or ""
            if isinstance(node, ast.FunctionDef) and 150 < len(code) < 700:
                has_docstring = ast.get_docstring(node) is not None
                n_lines = (node.body[0].end_lineno or 0) - node.lineno + 1 if has_docstring else 3
                yield code, "\n".join(code.split("\n")[:n_lines])


def _passages() -> Iterator[str]:
    for topic in import_module("pydoc_data.topics").topics.values():
        passages = (" ".join(part.split()) for part in re.split(r"\n\s*\n", topic))
        yield from (passage for passage in passages if 300 < len(passage) < 1000)


def write_texts(target: Target, written: Sequence[list[int]], end_token: int) -> dict[str, Tensor]:
    """Texts of up to LENGTH tokens, all at one position: prompts are read token by token."""
    n, first = len(written), _n_common(written)
    begins, ends = torch.tensor([len(tokens) for tokens in written]), torch.full((n,), LENGTH)
    temperatures = torch.tensor(_TEMPERATURES)[torch.arange(n) % len(_TEMPERATURES)]
    tokens = torch.zeros(n, LENGTH, dtype=torch.int64)
    for i, prompt in enumerate(written):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    features = torch.zeros(n, LENGTH, 3 * target.n_embd, dtype=torch.bfloat16)
    hidden = torch.zeros(n, LENGTH, target.n_embd, dtype=torch.bfloat16)
    shape = (len(target.layers), 2, n, target.n_kv, LENGTH, target.n_head_embd)
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    shared = cache[:, :, :1].clone()
    features[:, :first], hidden[:, :first] = target.decode(tokens[:1, :first], shared, 0)
    cache[...] = shared
    rows = torch.arange(n)  # texts that are still written
    for i in range(first, LENGTH - 1):
        row_features, row_hidden = target.decode(tokens[rows, i : i + 1], cache, i)
        features[rows, i], hidden[rows, i] = row_features[:, 0], row_hidden[:, 0]
        is_answer = begins[rows] <= i + 1
        drawn = rows[is_answer]
        logits = F.linear(row_hidden[is_answer, 0], target.output).float()
        tokens[drawn, i + 1] = draw(logits, temperatures[drawn])
        is_end = (tokens[drawn, i + 1] == end_token) & (ends[drawn] == LENGTH)
        ends[drawn[is_end]] = i + 2
        alive = ends[rows] == LENGTH
        if alive.float().mean() < 0.8:
            rows, cache = rows[alive], cache[:, :, alive]
            if len(rows) < 24:  # too few for the time of a pass
                ends[rows] = i + 2
                break
    names = ("tokens", "features", "hidden", "begins", "ends", "temperatures")
    return dict(zip(names, (tokens, features, hidden, begins, ends, temperatures), strict=True))


def _n_common(written: Sequence[list[int]]) -> int:
    return next(i for i, column in enumerate(zip(*written, strict=False)) if len(set(column)) > 1)


def draw(logits: Tensor, temperatures: Tensor) -> Tensor:
    """A token of each row; at temperature 0 the likeliest."""
    drawn, rows = logits.argmax(-1), temperatures.nonzero()[:, 0]
    sums = (logits[rows] / temperatures[rows, None]).softmax(-1).cumsum(-1)
    uniforms = torch.rand(len(rows), 1) * sums[:, -1:]
    drawn[rows] = torch.searchsorted(sums, uniforms)[:, 0].clamp(max=logits.shape[-1] - 1)
    return drawn
