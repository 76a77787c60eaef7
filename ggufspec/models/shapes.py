"""A header, or a registered model -> its ModelShape: what belongs to which layer."""

from __future__ import annotations

from ggufspec.errors import ModelError
from ggufspec.models import names
from ggufspec.models.header import Header, layer_of, read_header
from ggufspec.models.pull import locate
from ggufspec.models.quants import quant_of
from ggufspec.models.registry import ModelEntry, load_registry
from ggufspec.models.shape import Layer, ModelShape
from ggufspec.models.tensors import Tensor

_N_MOST_LAYERS = 2048
_INPUT = ("token_embd.", "token_types.", "position_embd.", "token_embd_norm.")
_EXPERTS = "_exps."
_STATE_VALUE_BYTES = 4


def shape_of(header: Header) -> ModelShape:
    """What a model is made of. Raises ModelError where its numbers cannot be true."""
    n_layers, n_embd = header.n_layers, header.number("embedding_length")
    if not 1 <= n_layers <= _N_MOST_LAYERS or not n_embd:
        raise ModelError(
            f"{header.paths[0]} claims {n_layers} layers of {n_embd} values: the file is damaged, "
            "or holds no model that writes text"
        )
    _check_numbers(header, n_embd)
    n_heads = max(header.numbers("attention.head_count", 0))
    by_layer: list[list[Tensor]] = [[] for _ in range(n_layers)]
    n_input = n_output = 0
    is_tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    for tensor in header.tensors:
        layer = layer_of(tensor.name)
        if layer is not None:
            by_layer[min(layer, n_layers - 1)].append(tensor)
        elif tensor.name.startswith(_INPUT):
            n_input += tensor.n_bytes
            if is_tied and tensor.name == "token_embd.weight":
                n_output += tensor.n_bytes  # read as a matrix at the end too
        else:
            n_output += tensor.n_bytes
    return ModelShape(
        name=header.name,
        layers=_layers(header, by_layer, n_embd),
        n_input_bytes=n_input,
        n_output_bytes=n_output,
        n_embd=n_embd,
        n_ff=max(header.numbers("feed_forward_length", 0)),
        n_heads=n_heads,
        n_embd_head=header.number("attention.key_length", n_embd // n_heads if n_heads else 0),
        n_vocab=header.n_vocab,
        n_ctx_train=header.n_ctx,
        n_params=max(header.n_params, 1),
        is_tied=is_tied,
    )


def _check_numbers(header: Header, n_embd: int) -> None:
    """Raise ModelError for what llama.cpp would end the process over."""
    n_inner = header.number("ssm.inner_size", 0)
    widths = {"token_embd.weight": n_embd} | {
        f"blk.{i}.ssm_out.weight": n_inner for i in range(header.n_layers)
    }
    for tensor in header.tensors:
        width = widths.get(tensor.name, tensor.shape[0])
        if tensor.shape[0] != width:
            raise ModelError(
                f"{header.paths[0]} is damaged: {tensor.name} is {tensor.shape[0]} wide, where the "
                f"header speaks of {width}. Download it again"
            )
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        epsilon = header.values.get(f"{header.architecture}.attention.{key}", 0.0)
        if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
            raise ModelError(
                f"{header.paths[0]} is damaged: its {key} is {epsilon}. Download it again"
            )


def _layers(header: Header, tensors: list[list[Tensor]], n_embd: int) -> tuple[Layer, ...]:
    n_experts = header.number("expert_count", 0)
    n_used = header.number("expert_used_count", 0)
    share = n_used / n_experts if 0 < n_used < n_experts else 1.0
    n_state = _state_bytes(header, n_embd)
    made = []
    for n_kv, of in zip(_kv_values(header, n_embd), tensors, strict=True):
        n_bytes = sum(tensor.n_bytes for tensor in of)
        n_expert_bytes = sum(tensor.n_bytes for tensor in of if _EXPERTS in tensor.name)
        made.append(
            Layer(
                n_bytes=n_bytes,
                n_active_bytes=n_bytes - round(n_expert_bytes * (1 - share)),
                n_kv_values=n_kv,
                n_state_bytes=0 if n_kv else n_state,
            )
        )
    return tuple(made)


def _kv_values(header: Header, n_embd: int) -> list[int]:
    """Numbers that K and V hold for a token, in each layer."""
    heads = header.numbers("attention.head_count", 0)
    kv_heads = header.numbers("attention.head_count_kv", max(heads))
    interval = header.number("full_attention_interval", 0)
    found = []
    for i, (n_heads, n_kv_heads) in enumerate(zip(heads, kv_heads, strict=True)):
        own = n_embd // n_heads if n_heads else 0
        n_key = header.number("attention.key_length", own)
        n_value = header.number("attention.value_length", own)
        has_attention = n_heads and (not interval or (i + 1) % interval == 0)
        found.append(n_kv_heads * (n_key + n_value) if has_attention else 0)
    return found


def _state_bytes(header: Header, n_embd: int) -> int:
    """Of a recurrent layer, for a sequence."""
    n_inner, n_state = header.number("ssm.inner_size", 0), header.number("ssm.state_size", 0)
    n_groups, n_conv = header.number("ssm.group_count", 0), header.number("ssm.conv_kernel", 0)
    n_values = max(n_conv - 1, 0) * (n_inner + 2 * n_groups * n_state) + n_state * n_inner
    n_values += (2 + header.number("wkv.head_size", 0)) * n_embd if not n_inner else 0
    return n_values * _STATE_VALUE_BYTES


# Bits of a weight of a layer, by the names of llama-quantize's mixes; of the larger of them the
# mean over a model of the Llama family, as its rules choose types.
_LAYER_BITS = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8_0": 8.5,
    "Q6_K": 6.5625,
    "Q5_K_M": 5.67,
    "Q5_K_S": 5.5,
    "Q5_1": 6.0,
    "Q5_0": 5.5,
    "Q4_K_M": 4.84,
    "Q4_K_S": 4.56,
    "Q4_1": 5.0,
    "Q4_0": 4.5,
    "Q3_K_L": 4.28,
    "Q3_K_M": 3.93,
    "Q3_K_S": 3.46,
    "Q2_K": 3.1,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.26,
    "IQ3_M": 3.66,
    "IQ3_XS": 3.3,
    "IQ2_M": 2.7,
}
_UNGATED = ("bloom", "gpt2")  # whose feed-forward layers are two matrices, not three
_OUTPUT_BITS, _MANY_BITS = 6.5625, 8.0  # Q6_K, but where the rest has more bits anyway


def reckoned(entry: ModelEntry) -> ModelShape:
    """A registered model whose file is not there, by its dimensions.

    Sizes are those of the file where its size is known, and about right (some per cent) where it
    is not. Raises ModelError where too little is known.
    """
    known = entry.shape
    quantization = quant_of(entry.files[0]) or "an unknown quantization"
    if known is None:
        raise ModelError(
            f"the registry knows no dimensions of {entry.alias}: download it first, with "
            f"`ggufspec models pull {entry.alias}`"
        )
    bits = _LAYER_BITS.get(quantization.upper())
    if bits is None and entry.size is None:
        raise ModelError(
            f"nothing is known of {quantization} here, nor of the size of {entry.alias}: download "
            f"it first, with `ggufspec models pull {entry.alias}`"
        )
    n_queries, n_keys = (n * known.n_embd_head for n in (known.n_heads, known.n_heads_kv))
    n_experts = known.n_experts or 1
    n_attention = known.n_embd * (2 * n_queries + 2 * n_keys)
    n_matrices = 2 if known.architecture in _UNGATED else 3
    n_expert = known.n_embd * n_matrices * known.n_ff
    n_weights = n_attention + n_experts * n_expert
    n_active = n_attention + (known.n_experts_used or n_experts) * n_expert
    embedding = known.n_embd * known.n_vocab
    n_params = known.n_layers * n_weights + embedding * (1 if known.tied else 2)
    of_layers = bits or 8 * (entry.size or 0) / n_params
    of_ends = of_layers if of_layers >= _MANY_BITS else _OUTPUT_BITS
    n_input = round(embedding * (of_ends if known.tied else of_layers) / 8)
    n_output = round(embedding * of_ends / 8)
    n_layer = round(n_weights * of_layers / 8)
    if entry.size is not None:
        n_layer = (entry.size - n_input - (0 if known.tied else n_output)) // known.n_layers
    layer = Layer(n_layer, round(n_layer * n_active / n_weights), 2 * n_keys)
    return ModelShape(
        name=entry.alias,
        layers=(layer,) * known.n_layers,
        n_input_bytes=n_input,
        n_output_bytes=n_output,
        n_embd=known.n_embd,
        n_ff=known.n_ff,
        n_heads=known.n_heads,
        n_embd_head=known.n_embd_head,
        n_vocab=known.n_vocab,
        n_ctx_train=known.n_ctx,
        n_params=n_params,
        is_tied=bool(known.tied),
        is_exact=entry.size is not None,
    )


def shape_of_name(name: str) -> ModelShape:
    """Of the model that a name means: of its file if it is on this machine, else as registered.

    Raises ModelError where it is neither there nor registered with its dimensions.
    """
    registry = load_registry()
    if (paths := locate(name, registry)) is not None:
        return shape_of(read_header(paths[0]))
    named = names.parse(name, registry)
    if isinstance(named, names.HubFiles) and named.entry is not None:
        return reckoned(named.entry)
    raise ModelError(
        f"{name} is not on this machine, and the registry knows no dimensions of it: download it "
        f"first, with `ggufspec models pull {name}`"
    )
