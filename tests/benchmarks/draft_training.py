"""What the trainings of `eagle3` and `dflash` share: options, texts, updates, loss, GGUF files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np

from tests.benchmarks.draft_text import LENGTH, F, Target, Tensor, text, torch

Texts = dict[str, Tensor]  # what draft_text stores, and `answer`: which tokens the target wrote
_N_VOCAB = 8192  # of a draft: the target's most frequent tokens
_N_IN_BATCH = 8
_VALIDATION = 50  # one text of so many


class Head(Protocol):
    """A draft that is trained: its weights, q, k, v and gate, up joined; `ids` of its tokens."""

    target: Target
    ids: Tensor
    weights: dict[str, Tensor]

    def loss(self, texts: Texts, done: float) -> Tensor: ...

    def acceptance(self, texts: Texts) -> str: ...


def run(
    name: str,
    train: Callable[[argparse.Namespace], None],
    convert: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> None:
    """The command line of a module: `text`, `train` and `convert`."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}")
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
        if command is train:
            options.add_argument("--start", type=Path, help="what an earlier train has stored")
    chosen = parser.parse_args(arguments)
    if torch is None:
        parser.error("torch is not installed; the head of this file says how to install it")
    torch.set_num_threads(getattr(chosen, "threads", 1))
    torch.manual_seed(1)
    chosen.run(chosen)


def random(n_out: int, n_in: int) -> Tensor:
    return torch.randn(n_out, n_in) / n_in**0.5


def train_head(
    options: argparse.Namespace,
    head_of: Callable[[Target, Tensor, dict[str, Tensor] | None], Head],
    name: str,
    matrix_rate: float,
    other_rate: float,
) -> None:
    """Train for the given time; prints the acceptance in texts that are not trained, and stores.

    With `--start` the weights begin as those of an earlier training, maybe with fewer texts.
    """
    target, texts = Target(options.target), _texts(options.folder)
    counts = torch.bincount(texts["tokens"][texts["answer"]], minlength=len(target.embeddings))
    if options.start:
        stored = torch.load(options.start)
        head = head_of(target, stored["ids"], stored["weights"])
    else:
        head = head_of(target, counts.topk(_N_VOCAB).indices.sort().values, None)
    matrices = [w for name, w in head.weights.items() if w.ndim == 2 and name != "output"]
    others = [w for name, w in head.weights.items() if w.ndim == 1 or name == "output"]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.01),
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
        for optimizer, rate in zip(optimizers, (matrix_rate, other_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * _share_of_rate(n_updates, done)
            optimizer.step()
            optimizer.zero_grad()
        n_updates, done = n_updates + 1, (time.monotonic() - began) / (60 * options.minutes)
        if n_updates % 100 == 0 or done >= 1:
            with torch.inference_mode():
                shares = head.acceptance(validation)
            sys.stdout.write(f"{done:.0%} of the time, {n_updates} updates; accepted: {shares}\n")
            sys.stdout.flush()
            torch.save({"weights": head.weights, "ids": head.ids}, options.folder / name)


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
