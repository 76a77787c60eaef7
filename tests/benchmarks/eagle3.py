"""Trains an EAGLE-3 draft for a small target of the llama architecture, on text that it writes.

    python -m tests.benchmarks.eagle3 text target.gguf FOLDER --minutes 20
    python -m tests.benchmarks.eagle3 train target.gguf FOLDER --minutes 55
    python -m tests.benchmarks.eagle3 convert target.gguf FOLDER/head.pt eagle3.gguf --type Q8_0

It needs torch, in an environment of its own:

    python -m venv scratch && scratch/bin/pip install torch==2.13.0 -e .

The draft computes as src/models/eagle3.cpp of llama.cpp: its cell i reads token i + 1 and the
target's hidden states of token i, and predicts token i + 2. The training is that of EAGLE-3
(https://arxiv.org/abs/2503.01840): several steps, each with the hidden rows of the one before,
against the target's own distribution.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.benchmarks.draft_text import LENGTH, F, Target, Tensor, in_neighbours, text, torch

Texts = dict[str, Tensor]  # what draft_text stores, and `answer`: which tokens the target wrote
_N_VOCAB = 8192  # of a draft: the target's most frequent tokens
_N_IN_BATCH = 8
_VALIDATION = 50  # one text of so many
_N_STEPS = (3, 5)  # that the training unrolls in the first half of its time, and in the second
_MATRIX_RATE, _OTHER_RATE = 2e-3, 1e-3  # of learning: Muon for matrices, AdamW
_STEP_WEIGHT = 0.8  # of a step's loss to that of the step before


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `text`, `train` and `convert`."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.eagle3")
    commands = parser.add_subparsers(required=True)
    for command, help_ in ((text, "write texts"), (train, "train"), (convert, "write a GGUF")):
        options = commands.add_parser(command.__name__, help=help_)
        options.set_defaults(run=command)
        options.add_argument("target", type=Path)
        if command is convert:
            options.add_argument("head", type=Path, help="head.pt of train")
            options.add_argument("output", type=Path)
            options.add_argument("--type", default="Q8_0", help="F16, Q8_0, Q4_0 ...")
            options.add_argument("--output-type", help="of the output matrix (default: --type)")
        else:
            options.add_argument("folder", type=Path, help="of texts with their hidden states")
            options.add_argument("--minutes", type=float, default=20.0)
            options.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args(arguments)
    if torch is None:
        parser.error("torch is not installed; the head of this file says how to install it")
    torch.set_num_threads(getattr(chosen, "threads", 1))
    torch.manual_seed(1)
    chosen.run(chosen)


def train(options: argparse.Namespace) -> None:
    """Train for the given time; prints the acceptance in texts that are not trained, and stores."""
    target, texts = Target(options.target), _texts(options.folder)
    counts = torch.bincount(texts["tokens"][texts["answer"]], minlength=len(target.embeddings))
    head = Head(target, counts.topk(_N_VOCAB).indices.sort().values)
    matrices = [w for name, w in head.weights.items() if w.ndim == 2 and name != "output"]
    others = [w for name, w in head.weights.items() if w.ndim == 1 or name == "output"]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=_MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    validates = torch.arange(len(texts["tokens"])) % _VALIDATION == 7
    validation = {name: values[validates] for name, values in texts.items()}
    trained, order, n_updates, done = (~validates).nonzero()[:, 0], torch.zeros(0), 0, 0.0
    began = time.monotonic()
    while done < 1:
        if len(order) < _N_IN_BATCH:
            order = trained[torch.randperm(len(trained))]
        chosen, order = order[:_N_IN_BATCH], order[_N_IN_BATCH:]
        head.loss({name: values[chosen] for name, values in texts.items()}, done).backward()
        torch.nn.utils.clip_grad_norm_(head.weights.values(), 1.0)
        for optimizer, rate in zip(optimizers, (_MATRIX_RATE, _OTHER_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * _share_of_rate(n_updates, done)
            optimizer.step()
            optimizer.zero_grad()
        n_updates, done = n_updates + 1, (time.monotonic() - began) / (60 * options.minutes)
        if n_updates % 100 == 0 or done >= 1:
            with torch.inference_mode():
                shares = head.acceptance(validation)
            sys.stdout.write(f"{done:.0%} of the time, {n_updates} updates; accepted: {shares}\n")
            sys.stdout.flush()
            torch.save({"weights": head.weights, "ids": head.ids}, options.folder / "head.pt")


class Head:
    """The draft's weights by GGUF names (q, k, v and gate, up joined), and its steps.

    Cells of all tokens are computed at once; row i of a step reads token i + 1 and hidden row i.
    """

    def __init__(self, target: Target, ids: Tensor) -> None:
        self.target, self.ids = target, ids
        self.weights = self._begin()
        for weight in self.weights.values():
            weight.requires_grad_()

    def _begin(self) -> dict[str, Tensor]:
        """The target's last layer on the last feature, so that rows begin as the target's own."""
        n, last = self.target.n_embd, self.target.layers[-1]
        fc, qkv = 0.1 * random(n, 3 * n), random(len(last["qkv"]), 2 * n)
        fc[:, -n:] += torch.eye(n)
        qkv[:, :n] *= 0.3
        qkv[:, n:] = last["qkv"].float()
        return {
            "fc": fc,
            "attn_norm": torch.ones(n),
            "attn_norm_2": last["attn_norm"].clone(),
            "qkv": qkv,
            "attn_output": last["attn_output"].float(),
            "ffn_norm": last["ffn_norm"].clone(),
            "gate_up": last["gate_up"].float(),
            "ffn_down": last["ffn_down"].float(),
            "output_norm": self.target.output_norm.clone(),
            "output": self.target.output[self.ids].float(),
        }

    def unroll(self, tokens: Tensor, features: Tensor, n_steps: int) -> list[Tensor]:
        """Rows of each step before the output norm; row i reads row i - 1 of the step before."""
        matrices = {k: w.bfloat16() for k, w in self.weights.items() if w.ndim == 2}
        embeddings = F.embedding(tokens[:, 1:], self.target.embeddings)
        hidden = F.linear(features[:, :-1], matrices["fc"]).float()
        memory: list[tuple[Tensor, Tensor]] = []
        steps = []
        for _ in range(n_steps):
            steps.append(self._step(matrices, embeddings, hidden, memory))
            hidden = F.pad(steps[-1], (0, 0, 1, 0))[:, :-1]
        return steps

    def _step(
        self,
        matrices: dict[str, Tensor],
        embeddings: Tensor,
        hidden: Tensor,
        memory: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Rows of one more step, whose keys and values are added to `memory`."""
        norm, w, n_step = self.target.norm, self.weights, len(memory)
        x = torch.cat((norm(embeddings, w["attn_norm"]), norm(hidden, w["attn_norm_2"])), -1)
        q, k, v = self.target.heads(F.linear(x.bfloat16(), matrices["qkv"]), 0)
        n_group = self.target.n_head // self.target.n_kv
        memory.append((k.repeat_interleave(n_group, 1), v.repeat_interleave(n_group, 1)))
        if n_step:
            seen = self._attend(q, memory)
        else:
            seen = F.scaled_dot_product_attention(q, *memory[0], is_causal=True)
        seen = seen.transpose(1, 2).reshape(hidden.shape)
        x = hidden + F.linear(seen, matrices["attn_output"])
        gate, up = F.linear(norm(x, w["ffn_norm"]).bfloat16(), matrices["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, matrices["ffn_down"])

    def _attend(self, q: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Row i of step k sees cells 0 ... i - k of step 0, and i - k + j of step j = 1 ... k."""
        n_rows, n_step, scale = q.shape[2], len(memory) - 1, q.shape[3] ** -0.5
        keys, values = memory[0]
        hides = torch.ones(n_rows, n_rows, dtype=torch.bool).triu(1 - n_step)
        scores = [(q @ keys.transpose(-1, -2) * scale).masked_fill(hides, float("-inf"))]
        later = [
            [F.pad(x, (0, 0, n_step - j, 0))[:, :, :n_rows] for x in memory[j]]
            for j in range(1, n_step + 1)
        ]
        scores += [(q * keys).sum(-1, keepdim=True) * scale for keys, _ in later]
        shares = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).bfloat16()
        seen = shares[..., :n_rows] @ values
        for j, (_, values) in enumerate(later):
            seen = seen + shares[..., n_rows + j, None] * values
        return seen

    def loss(self, texts: Texts, done: float) -> Tensor:
        """Of the answers' rows in each step; later steps of fewer rows."""
        n_steps = _N_STEPS[done > 0.5]
        predicts_answer = F.pad(texts["answer"][:, 2:], (0, 1)).flatten().nonzero()[:, 0]
        n_chosen = len(predicts_answer) // 128 * 128  # few shapes: oneDNN compiles for each
        chosen = predicts_answer[torch.randperm(len(predicts_answer))[:n_chosen]]
        target_rows = wanted(self, texts["hidden"][:, 1:].flatten(0, 1)[chosen])
        loss = torch.zeros(())
        for k, rows in enumerate(self.unroll(texts["tokens"], texts["features"], n_steps)):
            n_rows = n_chosen // (1, 2, 2, 4, 4)[k]
            shares = torch.full((n_rows,), _STEP_WEIGHT**k / n_rows)
            step_rows = rows.flatten(0, 1)[chosen[:n_rows]]
            loss = loss + cross_entropy(self, step_rows, target_rows[:n_rows], shares)
        return loss

    def acceptance(self, texts: Texts) -> str:
        """Of greedy texts, by step: the share of likeliest tokens right, after right ones."""
        n_steps = _N_STEPS[-1]
        right, tried = [0] * n_steps, [0] * n_steps
        greedy = (texts["temperatures"] == 0).nonzero()[:, 0]
        for chosen in greedy.split(8):
            tokens, answer = texts["tokens"][chosen], texts["answer"][chosen][:, 2:]
            alive = answer
            for k, rows in enumerate(self.unroll(tokens, texts["features"][chosen], n_steps)):
                drafted = self.ids[logits(self, rows[:, k:-1]).argmax(-1)]
                alive = alive[:, : drafted.shape[1]] & answer[:, k:]
                tried[k] += int(alive.sum())
                alive = alive & (drafted == tokens[:, 2 + k :])
                right[k] += int(alive.sum())
        return " ".join(f"{r / max(t, 1):.3f}" for r, t in zip(right, tried, strict=True))


def random(n_out: int, n_in: int) -> Tensor:
    return torch.randn(n_out, n_in) / n_in**0.5


def _texts(folder: Path) -> Texts:
    batches = [torch.load(path) for path in sorted(folder.glob("[0-9]*.pt"))]
    texts = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    position = torch.arange(LENGTH)
    texts["answer"] = (position >= texts["begins"][:, None]) & (position < texts["ends"][:, None])
    return texts


def _share_of_rate(n_updates: int, done: float) -> float:
    """The learning rate rises in 50 updates, and falls in the last 60 % of the time."""
    return min(1.0, (n_updates + 1) / 50) * min(1.0, (1 - done) / 0.6)


def wanted(head: Head, last_rows: Tensor) -> Tensor:
    """The target's distributions after rows of `hidden`, restricted to the draft's vocabulary."""
    with torch.no_grad():
        logits = F.linear(last_rows, head.target.output[head.ids])
        return logits.softmax(-1, dtype=torch.float32)


def cross_entropy(head: Head, rows: Tensor, wanted: Tensor, shares: Tensor) -> Tensor:
    """A value with the gradient of the rows' cross entropies, each times its share.

    The gradients of logits are written out: the output matrix takes half of the time.
    """
    x = head.target.norm(rows, head.weights["output_norm"])
    with torch.no_grad():
        inputs, matrix = x.bfloat16(), head.weights["output"].bfloat16()
        error = F.linear(inputs, matrix).softmax(-1, dtype=torch.float32)
        error = error.sub_(wanted).mul_(shares[:, None]).bfloat16()
        gradient = (error @ matrix).float()
        matrix_gradient = (error.T @ inputs).float()
    return (x * gradient).sum() + (head.weights["output"] * matrix_gradient).sum()


def logits(head: Head, rows: Tensor) -> Tensor:
    return F.linear(head.target.norm(rows, head.weights["output_norm"]), head.weights["output"])


def convert(options: argparse.Namespace) -> None:
    """Write the GGUF with the target's tokenizer; the embeddings are left to the target."""
    target, stored = Target(options.target), torch.load(options.head)
    w, n_kv = stored["weights"], target.n_kv * target.n_head_embd
    q, k, v = w["qkv"].split((target.n_embd, n_kv, n_kv))
    gate, up = w["gate_up"].chunk(2)
    layer = {
        "attn_q": in_neighbours(q, target.n_head),
        "attn_k": in_neighbours(k, target.n_kv),
        "attn_v": v,
        "ffn_gate": gate,
        "ffn_up": up,
    }
    names = ("attn_norm", "attn_norm_2", "attn_output", "ffn_norm", "ffn_down")
    layer |= {name: w[name] for name in names}
    tensors = {name: w[name] for name in ("fc", "output_norm", "output")}
    tensors |= {f"blk.0.{name}": weight for name, weight in layer.items()}
    header = {
        "general.name": f"EAGLE-3 draft of {options.target.stem}",
        "eagle3.block_count": 1,
        "eagle3.target_hidden_size": target.n_embd,
    }
    write_gguf(options, "eagle3", target, header, tensors, stored["ids"])


def write_gguf(
    options: argparse.Namespace,
    architecture: str,
    target: Target,
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor,
) -> None:
    """Write the GGUF: the target's header but for `header`, its tokenizer, and `tensors`."""
    writer = gguf.GGUFWriter(options.output, architecture)
    writer.add_array(f"{architecture}.target_layers", list(target.feature_layers))
    for name, field in target.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            key = name.replace("llama.", f"{architecture}.", 1)
            value = header.get(key, field.contents())
            writer.add_key_value(key, value, field.types[0], sub_type=field.types[-1])
    for key, value in header.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif key.replace(f"{architecture}.", "llama.", 1) not in target.fields:
            writer.add_uint32(key, value)
    writer.add_tensor("d2t", ids.numpy())
    for name, weight in tensors.items():
        values = weight.detach().numpy().astype(np.float32, order="C")
        kind = options.output_type if name == "output" and options.output_type else options.type
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
