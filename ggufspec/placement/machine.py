"""The GPUs and the memory of a machine, and their speeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ggufspec.placement.speeds import (
    GPU_BANDWIDTH,
    GPU_EFFICIENCY,
    GPU_SLOPE,
    HOST_BANDWIDTH,
    HOST_SLOPE,
    LAYER_SECONDS,
    Bandwidths,
    known_bandwidth,
)


@dataclass(frozen=True)
class Gpu:
    """A GPU or another device that computes layers.

    `bandwidth`: nominal bytes/s; None: looked up by `name`. `is_remote`: it belongs to an RPC
    server, and takes layers of the target only. `is_shared`: it uses the machine's memory.
    `slowness`: measured seconds divided by those predicted from the bandwidth; 1 if not measured.
    `slope`: cost of each further token of a batch, in passes over one token.
    """

    name: str
    n_free: int
    bandwidth: float | None = None
    is_remote: bool = False
    slowness: float = 1.0
    slope: float = GPU_SLOPE
    is_shared: bool = False

    @property
    def nominal(self) -> float:
        """Nominal bytes/s, guessed if unknown."""
        return self.bandwidth or known_bandwidth(self.name) or GPU_BANDWIDTH

    @property
    def is_measured(self) -> bool:
        """Whether its speed was measured."""
        return self.slowness != 1

    @property
    def effective(self) -> float:
        """Bytes/s reached in small batches."""
        return self.nominal * GPU_EFFICIENCY / self.slowness


@dataclass(frozen=True)
class Machine:
    """The GPUs and the free memory of a machine.

    `host_bandwidth`: effective bytes/s of passes on the CPU, if known; `host_slope`: cost of each
    further token of a batch there, in passes over one token.
    """

    gpus: tuple[Gpu, ...]
    n_host_free: int | None
    host_bandwidth: float | None = None
    host_slope: float = HOST_SLOPE

    @property
    def n_remote(self) -> int:
        """Number of GPUs that belong to RPC servers; they come first in `gpus`."""
        return sum(gpu.is_remote for gpu in self.gpus)

    @property
    def bandwidths(self) -> Bandwidths:
        """The speeds for predictions; several GPUs count as one GPU with their mean speed."""
        host = self.host_bandwidth or HOST_BANDWIDTH
        if not self.gpus:
            return Bandwidths(host=host, host_slope=self.host_slope, transfer=0.0)
        return Bandwidths(
            fmean(gpu.effective for gpu in self.gpus),
            host,
            fmean(gpu.slope for gpu in self.gpus),
            self.host_slope,
            LAYER_SECONDS * fmean(gpu.slowness for gpu in self.gpus),
        )
