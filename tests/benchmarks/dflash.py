"""Trains a DFlash draft for a small target of the llama architecture, on text that it writes.

    python -m tests.benchmarks.dflash text target.gguf FOLDER --minutes 20
    python -m tests.benchmarks.dflash train target.gguf FOLDER --minutes 60
    python -m tests.benchmarks.dflash convert target.gguf FOLDER/dflash.pt dflash.gguf --type Q5_0

It needs torch, as `tests.benchmarks.eagle3`, which writes the same texts.

The draft computes as src/models/dflash.cpp of llama.cpp: a token that the target has decoded
becomes a key and a value in each layer, made of the target's hidden states; the last token and
masks after it are a block that one pass computes, where each sees all of the block. The row of
mask i is the distribution of the token i after the last. The training is that of DFlash
(https://arxiv.org/abs/2602.06036): many blocks of a text at once, nearer masks with more weight,
here against the target's own distribution.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tests.benchmarks.draft_text import F, Target, Tensor, torch
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

_N_LAYERS, _N_FF = 3, 768
_N_BLOCK = 8  # tokens of a block, with the last one: 7 are drafted
_N_BLOCK_LEAST = 5  # half of the updates: drafts may be shorter than the training's
_N_ROWS = 256  # of blocks in each text
_MATRIX_RATE, _OTHER_RATE = 5e-3, 2e-3  # of learning: Muon for matrices, AdamW
_MASK_SHARE = 0.8  # of a mask's loss to that of the mask before
_SIZE, _SCALE = 23.0, 6.0  # root mean square of the last features; this draft's are smaller
_N_NEAR = 12  # fastest of a head's turns
_MASK = "<empty_output>"  # a token whose embedding no training of the target has touched


def main(arguments: Sequence[str] | None = None) -> None:
    run("dflash", train, convert, arguments)


def train(options: argparse.Namespace) -> None:
    train_head(options, Head, "dflash.pt", _MATRIX_RATE, _OTHER_RATE)


class Head:
    """The draft's weights by GGUF names (q, k, v and gate, up joined), and its blocks."""

    def __init__(
        self, target: Target, ids: Tensor, weights: dict[str, Tensor] | None = None
    ) -> None:
        self.target, self.ids = target, ids
        self.mask = target.fields["tokenizer.ggml.tokens"].contents().index(_MASK)
        self.weights = self._begin() if weights is None else weights
        for weight in self.weights.values():
            weight.requires_grad_()

    def _begin(self) -> dict[str, Tensor]:
        """The target's last layers; the first of them reads the last features of the text.

        Hidden states are smaller than the target's by a factor, which norms undo: the training's
        steps then change them faster.
        """
        n, target = self.target.n_embd, self.target
        fc = 0.1 * random(n, 3 * n)
        fc[:, -n:] += torch.eye(n)
        weights = {
            "fc": fc,
            "enc.output_norm": torch.ones(n),
            "output_norm": target.output_norm.clone(),
            "output": target.output[self.ids].float(),
        }
        for i, last in enumerate(target.layers[-_N_LAYERS:]):
            weights |= {f"blk.{i}.{name}": w for name, w in self._layer(last).items()}
        weights["blk.0.qkv"] = self._latest(fc)
        weights["blk.0.attn_output"] = _SIZE / _SCALE * torch.eye(n)
        return weights

    def _layer(self, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        """A layer of the target with as many key heads as query heads, and fewer hidden units.

        Its first norm is in the matrices, because the features have a norm for all layers.
        """
        n, n_kv, n_head_embd = self.target.n_embd, self.target.n_kv, self.target.n_head_embd
        qkv = layer["qkv"].float() * layer["attn_norm"]
        q, k, v = qkv.split((n, n_kv * n_head_embd, n_kv * n_head_embd))
        k, v = (
            x.view(n_kv, n_head_embd, n).repeat_interleave(n // len(x), 0).reshape(n, n)
            for x in (k, v)
        )
        gate, up = layer["gate_up"].float().chunk(2)
        down = layer["ffn_down"].float()
        sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = sizes.topk(_N_FF).indices.sort().values
        return {
            "attn_norm": torch.ones(n),
            "qkv": torch.cat((q, k, v)),
            "attn_q_norm": torch.ones(n_head_embd),
            "attn_k_norm": torch.ones(n_head_embd),
            "attn_output": layer["attn_output"].float() / _SCALE,
            "ffn_norm": layer["ffn_norm"].clone(),
            "gate_up": torch.cat((gate[kept], up[kept])),
            "ffn_down": down[:, kept] / _SCALE,
        }

    def _latest(self, fc: Tensor) -> Tensor:
        """Queries, keys and values that copy the last tokens' features to the masks.

        Features share a direction, and so do embeddings. Queries of masks and keys of all other
        cells get one vector for it; turned, these two agree the better the nearer the positions.
        """
        n, target = self.target.n_embd, self.target
        tokens = self.ids[torch.randint(len(self.ids), (1, 64))]
        shape = (len(target.layers), 2, 1, target.n_kv, 64, target.n_head_embd)
        features = target.decode(tokens, torch.zeros(shape, dtype=torch.bfloat16), 0)[0].float()
        ones = torch.ones(n)
        of_text = F.normalize(target.norm(F.linear(features[0, 1:], fc), ones).mean(0), dim=0)
        of_mask = F.normalize(target.embeddings[self.mask], dim=0)
        of_last = target.norm(target.embeddings[tokens[0]], ones).mean(0)
        of_last = F.normalize(of_last - of_last @ of_mask * of_mask, dim=0)
        near = torch.zeros(target.n_head, target.n_head_embd)
        near[:, :_N_NEAR] = _N_NEAR**-0.5
        qkv = 0.3 * random(3 * n, n)
        qkv[:n] += 0.3 * torch.outer(near.flatten(), of_mask)
        qkv[n : 2 * n] += 0.3 * torch.outer(near.flatten(), of_text + of_last)
        qkv[2 * n :] = torch.eye(n)
        return qkv

    def blocks(self, tokens: Tensor, features: Tensor, firsts: Tensor, n_block: int) -> Tensor:
        """Rows before the output norm: (n_texts, n_blocks, n_block, n_embd).

        `firsts` (n_texts, n_blocks) are the positions of last tokens: a block sees the features of
        the tokens before its own.
        """
        target, w = self.target, self.weights
        matrices = {name: x.bfloat16() for name, x in w.items() if x.ndim == 2 and name != "output"}
        n_texts, n_tokens = tokens.shape
        places = (firsts[:, :, None] + torch.arange(n_block)).flatten(1)
        text = torch.arange(n_tokens).expand(n_texts, -1)
        block = torch.arange(places.shape[1]) // n_block
        sees_text = text[:, None, :] < firsts.repeat_interleave(n_block, 1)[:, :, None]
        sees_block = (block[:, None] == block).expand(n_texts, -1, -1)
        sees = torch.cat((sees_text, sees_block), -1)[:, None]
        read = torch.full_like(places, self.mask)
        read[:, ::n_block] = tokens.gather(1, firsts)
        x = F.embedding(read, target.embeddings)
        known = target.norm(F.linear(features, matrices["fc"]).float(), w["enc.output_norm"])
        known = known.bfloat16()
        for i in range(_N_LAYERS):
            layer = {name: f"blk.{i}.{name}" for name in self._layer_names}
            qkv = matrices[layer["qkv"]]
            own = F.linear(target.norm(x, w[layer["attn_norm"]]).bfloat16(), qkv)
            q, k, v = (self._heads(part) for part in own.chunk(3, -1))
            text_k, text_v = (
                self._heads(part) for part in F.linear(known, qkv[target.n_embd :]).chunk(2, -1)
            )
            q = self._rotated(q, w[layer["attn_q_norm"]], places)
            k = self._rotated(k, w[layer["attn_k_norm"]], places)
            text_k = self._rotated(text_k, w[layer["attn_k_norm"]], text)
            keys, values = torch.cat((text_k, k), 2), torch.cat((text_v, v), 2)
            seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=sees)
            seen = seen.transpose(1, 2).reshape(x.shape)
            x = x + F.linear(seen, matrices[layer["attn_output"]])
            inputs = target.norm(x, w[layer["ffn_norm"]]).bfloat16()
            gate, up = F.linear(inputs, matrices[layer["gate_up"]]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, matrices[layer["ffn_down"]])
        return x.view(n_texts, -1, n_block, target.n_embd)

    _layer_names = (
        *("attn_norm", "qkv", "attn_q_norm", "attn_k_norm", "attn_output"),
        *("ffn_norm", "gate_up", "ffn_down"),
    )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.target.n_head_embd)).transpose(1, 2)

    def _rotated(self, x: Tensor, norm: Tensor, places: Tensor) -> Tensor:
        """Heads (n_texts, n_heads, n_rows, n_head_embd) after their norm, turned."""
        a, b = F.rms_norm(x.float(), norm.shape, norm, self.target.eps).bfloat16().chunk(2, -1)
        cos, sin = (table[places][:, None] for table in self.target.turns)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def loss(self, texts: Texts, done: float) -> Tensor:
        """Of blocks at random positions of the answers; masks after their ends have no share."""
        del done
        n_block = (_N_BLOCK, _N_BLOCK_LEAST)[int(torch.randint(2, ()))]
        n_blocks, answer = _N_ROWS // n_block, texts["answer"]
        order = torch.rand(answer.shape) + F.pad(answer[:, 1:-_N_BLOCK], (0, _N_BLOCK + 1))
        firsts = order[:, :-_N_BLOCK].topk(n_blocks).indices
        rows = self.blocks(texts["tokens"], texts["features"], firsts, n_block)[:, :, 1:]
        after = firsts[:, :, None] + torch.arange(1, n_block)  # positions of tokens to predict
        counts = answer.gather(1, after.flatten(1)).flatten().nonzero()[:, 0]
        n_chosen = len(counts) // 128 * 128  # few shapes: oneDNN compiles for each
        chosen = counts[torch.randperm(len(counts))[:n_chosen]]
        n_embd = rows.shape[-1]
        before = (after - 1).flatten(1)[:, :, None].expand(-1, -1, n_embd)
        last_rows = texts["hidden"].gather(1, before).flatten(0, 1)[chosen]
        shares = _MASK_SHARE ** (chosen % (n_block - 1)).float() / n_chosen
        return cross_entropy(
            self, rows.reshape(-1, n_embd)[chosen], wanted(self, last_rows), shares
        )

    def acceptance(self, texts: Texts) -> str:
        """Of greedy texts, by mask: the share of right tokens after right ones, and of all."""
        n = _N_BLOCK - 1
        right, tried, alone, all_ = (torch.zeros(n) for _ in range(4))
        for i in (texts["temperatures"] == 0).nonzero()[:, 0]:
            tokens, answer = texts["tokens"][i, None], texts["answer"][i]
            firsts = (answer.nonzero()[:, 0] - 1)[:-n]
            for some in firsts.split(_N_ROWS // _N_BLOCK):
                rows = self.blocks(tokens, texts["features"][i, None], some[None], _N_BLOCK)
                drafted = self.ids[logits(self, rows[0, :, 1:]).argmax(-1)]
                is_right = drafted == tokens[0, some[:, None] + torch.arange(1, _N_BLOCK)]
                kept = is_right.cumprod(-1).float()
                right, tried = right + kept.sum(0), tried + F.pad(kept, (1, -1), value=1).sum(0)
                alone, all_ = alone + is_right.sum(0), all_ + len(some)
        shown = [f"{share:.3f}" for share in right / tried.clamp(min=1)]
        return " ".join([*shown, "| alone", *(f"{share:.3f}" for share in alone / all_)])


def convert(options: argparse.Namespace) -> None:
    """Write the GGUF with the target's tokenizer; the embeddings are left to the target."""
    target, stored = Target(options.target), torch.load(options.head)
    head = Head(target, stored["ids"], stored["weights"])
    tensors = {}
    for name, weight in head.weights.items():
        before, _, last = name.rpartition(".")
        if last == "qkv":
            parts = zip(("attn_q", "attn_k", "attn_v"), weight.chunk(3), strict=True)
        elif last == "gate_up":
            parts = zip(("ffn_gate", "ffn_up"), weight.chunk(2), strict=True)
        else:
            tensors[name] = weight
            continue
        tensors |= {f"{before}.{part}": w for part, w in parts}
    header = {
        "general.name": f"DFlash draft of {options.target.stem}",
        "dflash.block_count": _N_LAYERS,
        "dflash.feed_forward_length": _N_FF,
        "dflash.attention.head_count_kv": target.n_head,
        "dflash.block_size": _N_BLOCK,
        "tokenizer.ggml.mask_token_id": head.mask,
    }
    write_gguf(options, "dflash", target, header, tensors, head.ids)


if __name__ == "__main__":
    main()
