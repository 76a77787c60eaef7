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
from collections.abc import Sequence

from tests.benchmarks.draft_text import F, Target, Tensor, in_neighbours, torch
from tests.benchmarks.draft_training import (
    Texts,
    cross_entropy,
    logits,
    random,
    run,
    train_head,
    wanted,
    write_gguf,
)

_N_STEPS = (3, 5)  # that the training unrolls in the first half of its time, and in the second
_MATRIX_RATE, _OTHER_RATE = 2e-3, 1e-3  # of learning: Muon for matrices, AdamW
_STEP_WEIGHT = 0.8  # of a step's loss to that of the step before


def main(arguments: Sequence[str] | None = None) -> None:
    run("eagle3", train, convert, arguments)


def train(options: argparse.Namespace) -> None:
    train_head(options, Head, "head.pt", _MATRIX_RATE, _OTHER_RATE)


class Head:
    """The draft's weights by GGUF names (q, k, v and gate, up joined), and its steps.

    Cells of all tokens are computed at once; row i of a step reads token i + 1 and hidden row i.
    """

    def __init__(
        self, target: Target, ids: Tensor, weights: dict[str, Tensor] | None = None
    ) -> None:
        self.target, self.ids = target, ids
        self.weights = self._begin() if weights is None else weights
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


if __name__ == "__main__":
    main()
