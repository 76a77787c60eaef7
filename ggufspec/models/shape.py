"""What a model is made of, as far as memory and speed go by it. Facts; no files, no devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A block of a model.

    n_bytes: of its weights. n_active_bytes: of those that a token reads (of a mixture of experts,
    the experts that it is sent to). n_kv_values: numbers that the K and V caches hold for a token,
    of the whole context: a window would not let go of rejected tokens. n_state_bytes: what it holds
    whatever the context (recurrent layers).
    """

    n_bytes: int
    n_active_bytes: int
    n_kv_values: int
    n_state_bytes: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A model, whoever told of it: a file's header, or a registry.

    n_input_bytes: the token embedding, of which a pass reads a row a token. n_output_bytes: all
    that comes after the last layer, and the embedding again where it is_tied to the output.
    is_exact: sizes are those of a file; else they were reckoned.
    """

    name: str
    layers: tuple[Layer, ...]
    n_input_bytes: int
    n_output_bytes: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_embd_head: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    is_tied: bool = False
    is_exact: bool = True

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    @property
    def n_bytes(self) -> int:
        """Of all weights in the file."""
        ends = self.n_output_bytes if self.is_tied else self.n_input_bytes + self.n_output_bytes
        return ends + sum(at.n_bytes for at in self.layers)

    @property
    def n_bits(self) -> float:
        """Of a weight, on average."""
        return 8 * self.n_bytes / self.n_params
