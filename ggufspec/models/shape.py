"""The sizes of a model's parts, layer by layer, from which memory and speed are predicted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ggufspec.errors import ModelError
from ggufspec.models.gguf_file import DENSE, EXPERTS, Tensor
from ggufspec.models.head_facts import DFLASH, EAGLE3, HeadFacts
from ggufspec.models.header import Header
from ggufspec.models.heads import DraftFile, is_mtp_alone, read_draft

_INPUT = ("token_embd.", "token_types.", "position_embd.", "token_embd_norm.")
_EXPERTS = "_exps."
_OWN_INPUT, _OWN_OUTPUT = "nextn.embed_tokens.weight", "nextn.shared_head_head.weight"
_STATE_VALUE_BYTES = 4
_RECURRENT = (".ssm_", ".shortconv.", ".time_mix_")  # tensors of layers with a state
# Architectures whose states llama.cpp can roll back (llm_arch_supports_rs_rollback), and whose
# state size `_state_bytes` computes.
_ROLLED_BACK = frozenset(("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe"))


@dataclass(frozen=True)
class Layer:
    """A block of a model.

    n_kv_values: numbers in the KV cache per token; a sliding window does not reduce them, since
    rejected tokens must be removable. n_ffn_bytes: size of the experts, or of the dense
    feed-forward network, which can stay on the CPU while the rest is on a GPU.
    """

    n_bytes: int  # size of its weights
    n_active_bytes: int  # size of the weights that one token reads; in a mixture, few experts
    n_kv_values: int
    n_state_bytes: int = 0  # size of a recurrent state, at any context length
    n_ffn_bytes: int = 0
    n_expert_bytes: int = 0  # size of the experts alone


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's parts.

    n_output_bytes: everything after the last layer, and the embedding again if it is_tied to the
    output. n_recurrent: numbers per token that enter the convolution and leave the state of a
    recurrent layer. n_shared_bytes: part of a head's output that belongs to the target: read, but
    not stored again.
    """

    name: str
    layers: tuple[Layer, ...]  # a layer that is not loaded, such as an unused head, has 0 bytes
    n_input_bytes: int  # the token embedding, of which a pass reads a row for each token
    n_output_bytes: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_embd_head: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    matrix_type: str = "unknown"  # see Header
    is_tied: bool = False
    is_exact: bool = True  # sizes come from a file; otherwise they are estimates
    n_shared_bytes: int = 0
    n_row_values: int = 0  # of a head: numbers of hidden states kept per token of a batch
    n_logits: int = 0  # of a head: logits computed per token of a batch (EAGLE-3, DFlash)
    n_step_tokens: int = 1  # of a head: tokens in a pass that drafts
    n_per_step: int = 1  # of a head: tokens that this pass predicts
    is_inside: bool = False  # a head in the target's file, and on the target's devices
    n_recurrent: int = 0
    can_roll_back: bool = False  # llama.cpp can keep earlier recurrent states
    n_matrix_bytes: int = 0  # size of the largest matrix
    has_windows: bool = False  # some layers have sliding windows
    n_experts: int = 0  # in a layer; 0: it is no mixture
    n_experts_used: int = 0  # per token
    n_ff_expert: int = 0  # the width of an expert's feed-forward network

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_bytes(self) -> int:
        """Size of all weights that are loaded."""
        ends = self.n_output_bytes if self.is_tied else self.n_input_bytes + self.n_output_bytes
        return ends - self.n_shared_bytes + sum(at.n_bytes for at in self.layers)

    @property
    def n_pass_bytes(self) -> int:
        """Bytes that a pass over one token reads."""
        return self.n_output_bytes + sum(at.n_active_bytes for at in self.layers)

    @property
    def ffn_pattern(self) -> str:
        """llama.cpp's pattern for the names of the tensors that `Layer.n_ffn_bytes` counts."""
        return EXPERTS if self.n_experts else DENSE


def shape_of(header: Header) -> ModelShape:
    """The shape of a model, from its header. Raises ModelError for impossible numbers.

    Layers for multi-token prediction count as not loaded, unless they are a file of their own.
    """
    n_layers, n_embd = header.n_layers, header.number("embedding_length")
    if not n_layers or not n_embd:
        raise ModelError(
            f"{header.paths[0]} claims {n_layers} layers of {n_embd} values: the file is damaged, "
            "or not a language model"
        )
    _check_numbers(header, n_embd)
    _check_tokens(header)
    n_heads = max(header.numbers("attention.head_count", 0))
    is_tied = header.is_tied and header.architecture != EAGLE3
    n_experts, n_used = experts_of(header)
    n_ff = max(header.numbers("feed_forward_length", 0))
    used = header.mtp_layers if is_mtp_alone(header) else range(header.mtp_layers.start)
    inside = [tensor for tensor in header.tensors if tensor.layer in used]
    ends = [tensor for tensor in header.tensors if tensor.layer is None]
    n_input = sum(tensor.n_bytes for tensor in ends if tensor.name.startswith(_INPUT))
    n_output = sum(tensor.n_bytes for tensor in ends) - n_input
    if is_tied:  # the embedding is also read as the output matrix
        n_output += sum(tensor.n_bytes for tensor in ends if tensor.name == "token_embd.weight")
    return ModelShape(
        name=header.name,
        layers=_layers(header, n_embd, used),
        n_input_bytes=n_input,
        n_output_bytes=n_output,
        n_embd=n_embd,
        n_ff=n_ff,
        n_heads=n_heads,
        n_embd_head=header.number("attention.key_length", n_embd // n_heads if n_heads else 0),
        n_vocab=header.n_vocab,
        n_ctx_train=header.n_ctx,
        n_params=max(sum(tensor.n_values for tensor in (*ends, *inside)), 1),
        matrix_type=header.matrix_type,
        is_tied=is_tied,
        n_recurrent=header.number("ssm.inner_size", 0) + _n_convolved(header),
        can_roll_back=header.architecture in _ROLLED_BACK,
        n_matrix_bytes=max((tensor.n_bytes for tensor in inside), default=0),
        has_windows=header.number("attention.sliding_window", 0) > 0,
        n_experts=n_experts,
        n_experts_used=n_used,
        n_ff_expert=header.number("expert_feed_forward_length", n_ff) if n_experts else 0,
    )


def with_kept(shape: ModelShape, header: Header, stays: Callable[[str], bool]) -> ModelShape:
    """The shape with `n_ffn_bytes` set to the size of the tensors for which `stays(name)`."""
    kept = [0] * shape.n_layers
    for tensor in header.tensors:
        layer = tensor.layer
        if layer is not None and shape.layers[layer].n_bytes and stays(tensor.name):
            kept[layer] += tensor.n_bytes
    layers = (replace(at, n_ffn_bytes=n) for at, n in zip(shape.layers, kept, strict=True))
    return replace(shape, layers=tuple(layers))


def draft_shape(target: Header, draft: DraftFile) -> tuple[ModelShape, HeadFacts | None]:
    """The shape of a draft for a target, and the facts of the head if the draft is one.

    Raises ModelError and VocabError for a head that does not fit the target.
    """
    header, head = read_draft(target, draft)
    if head is not None:
        return _head_shape(target, header, head), head
    assert header is not None, "a draft without a file is a head"
    return shape_of(header), None


def _head_shape(target: Header, draft: Header | None, head: HeadFacts) -> ModelShape:
    of_target = shape_of(target)
    shared, n_embd = of_target.n_output_bytes, of_target.n_embd
    # In llama.cpp's buffer, in the batch, and kept until read, with room for as many again.
    n_row_values = 4 * (len(head.target_layers) or 1) * n_embd
    if draft is not None:
        made = replace(shape_of(draft), n_row_values=n_row_values)
        if head.kind in (EAGLE3, DFLASH):
            n_own = draft.tensor("d2t").n_values if "d2t" in draft.tensor_names else 0
            made = replace(made, n_logits=made.n_vocab + n_own)
        if (block := head.block) is not None:
            n = block.n_tokens
            made = replace(made, n_step_tokens=n, n_per_step=n - block.first)
        if head.shares_cache:
            return replace(made, layers=tuple(replace(at, n_kv_values=0) for at in made.layers))
        if "output.weight" in draft.tensor_names or made.is_tied:
            return made
        return replace(made, n_output_bytes=made.n_output_bytes + shared, n_shared_bytes=shared)
    layers = _layers(target, n_embd, target.mtp_layers)[target.mtp_layers.start :]
    if any(tensor.name.endswith(_OWN_OUTPUT) for tensor in target.mtp_tensors):
        shared = 0
    return replace(
        of_target,
        name=f"the MTP head of {of_target.name}",
        layers=layers,
        n_input_bytes=0,
        n_output_bytes=shared,
        n_shared_bytes=shared,
        n_params=sum(tensor.n_values for tensor in target.mtp_tensors),
        is_tied=False,
        n_recurrent=0,
        n_row_values=n_row_values,
        is_inside=True,
    )


def _check_numbers(header: Header, n_embd: int) -> None:
    """Raise ModelError for numbers on which llama.cpp would abort the process."""
    n_inner = header.number("ssm.inner_size", 0)
    widths = {"token_embd.weight": n_embd} | {
        f"blk.{i}.ssm_out.weight": n_inner for i in range(header.n_layers)
    }
    for tensor in header.tensors:
        width = widths.get(tensor.name, tensor.shape[0])
        if tensor.shape[0] != width:
            raise header.damaged(
                f"{tensor.name} is {tensor.shape[0]} wide, and the header says {width}"
            )
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        epsilon = header.values.get(f"{header.architecture}.attention.{key}", 0.0)
        if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
            raise header.damaged(f"its {key} is {epsilon}")


def _check_tokens(header: Header) -> None:
    """Raise ModelError if two tokens have the same text, at which llama.cpp aborts the process."""
    tokens = header.tokens
    unique = set(tokens)
    is_usual = len(unique) == len(tokens) and b"" not in unique and b"\0" not in b"".join(tokens)
    if is_usual or header.values.get("tokenizer.ggml.model") in ("no_vocab", "none"):
        return
    ids: dict[bytes, int] = {}
    for i, token in enumerate(tokens):
        text = token.partition(b"\0")[0] or b"[EMPTY_%d]" % i  # as llama.cpp reads it
        if ids.setdefault(text, i) != i:
            raise ModelError(
                f"{header.paths[0]} cannot be loaded by llama.cpp: tokens {ids[text]} and {i} have "
                f"the same text, {text.decode('utf-8', 'replace')!r}. Use another conversion of "
                "the model, or give one of them another text"
            )


def _layers(header: Header, n_embd: int, used: range) -> tuple[Layer, ...]:
    """All layers; layers outside `used` have 0 bytes."""
    n_experts, n_used = experts_of(header)
    share = n_used / n_experts if n_experts else 1.0
    pattern = re.compile(EXPERTS if n_experts else DENSE)
    n_state = _state_bytes(header, n_embd)
    tensors: list[list[Tensor]] = [[] for _ in range(header.n_layers)]
    for tensor in header.tensors:
        if (layer := tensor.layer) is not None:
            tensors[min(layer, header.n_layers - 1)].append(tensor)
    made = []
    for i, (n_kv, of) in enumerate(zip(_kv_values(header, n_embd), tensors, strict=True)):
        if i not in used:
            made.append(Layer(0, 0, 0))
            continue
        n_bytes = sum(tensor.n_bytes for tensor in of)
        n_expert_bytes = sum(tensor.n_bytes for tensor in of if _EXPERTS in tensor.name)
        n_ffn_bytes = sum(tensor.n_bytes for tensor in of if pattern.search(tensor.name))
        n_lookup = sum(tensor.n_bytes for tensor in of if tensor.name.endswith(_OWN_INPUT))
        n_active = n_bytes - n_lookup - round(n_expert_bytes * (1 - share))
        if i in header.mtp_layers:
            n_active //= len(header.mtp_layers)  # a step computes one of them
        has_state = any(part in tensor.name for tensor in of for part in _RECURRENT)
        n_own_state = n_state if has_state else 0
        made.append(Layer(n_bytes, n_active, n_kv, n_own_state, n_ffn_bytes, n_expert_bytes))
    return tuple(made)


def experts_of(header: Header) -> tuple[int, int]:
    """Numbers of experts in a layer and used per token; 0 and 0 unless the model is a mixture."""
    n_experts, n_used = (header.number(f"expert_{of}", 0) for of in ("count", "used_count"))
    return (n_experts, n_used) if 0 < n_used < n_experts else (0, 0)


def _kv_values(header: Header, n_embd: int) -> list[int]:
    heads = header.numbers("attention.head_count", 0)
    kv_heads = header.numbers("attention.head_count_kv", max(heads))
    interval = header.number("full_attention_interval", 0)
    found = []
    for i, (n_heads, n_kv_heads) in enumerate(zip(heads, kv_heads, strict=True)):
        own = n_embd // n_heads if n_heads else 0
        n_key = header.number("attention.key_length", own)
        n_value = header.number("attention.value_length", own)
        is_full = not interval or (i + 1) % interval == 0 or i in header.mtp_layers
        has_attention = n_heads and is_full
        found.append(n_kv_heads * (n_key + n_value) if has_attention else 0)
    return found


def _state_bytes(header: Header, n_embd: int) -> int:
    n_conv = header.number("ssm.conv_kernel", 0)
    n_values = max(n_conv - 1, 0) * _n_convolved(header)
    n_values += header.number("ssm.state_size", 0) * header.number("ssm.inner_size", 0)
    n_values += n_embd * max(header.number("shortconv.l_cache", 1) - 1, 0)
    if n_head := header.number("wkv.head_size", 0):
        n_values += (header.number("token_shift_count", 2) + n_head) * n_embd
    return n_values * _STATE_VALUE_BYTES


def _n_convolved(header: Header) -> int:
    n_groups, n_state = header.number("ssm.group_count", 0), header.number("ssm.state_size", 0)
    return header.number("ssm.inner_size", 0) + 2 * n_groups * n_state
