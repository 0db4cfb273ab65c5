"""Published peaks of chips for runs and plans. A bound from them is a bound, not a prediction."""

from __future__ import annotations

import re
from typing import NamedTuple


class Chip(NamedTuple):
    """Peaks per chip as published (TPUs: https://docs.cloud.google.com/tpu/docs/tpu7x; GPUs: SXM
    boards, dense products, https://www.nvidia.com/en-us/data-center/h200).
    """

    name: str
    pattern: str  # of jax.Device.device_kind, in lower case
    devices: int  # JAX devices of a chip
    bf16_tflops: float
    hbm_gib: float
    hbm_gb_s: float
    # out of a chip over all its links: half the published figure, which counts both directions
    ici_gb_s: float
    clock_ghz: float = 0.0  # of a TPU's core, if it follows from the peak and the matrix units

    @property
    def device_flops(self) -> float:
        """Peak of one JAX device in bfloat16, FLOP/s."""
        return self.bf16_tflops * 1e12 / self.devices


CHIPS = (
    Chip("v5p", r"tpu v5p?$", 1, 459, 95, 2765, 600, 1.75),
    Chip("v6e", r"tpu v6( lite|e)?$", 1, 918, 32, 1638, 400),
    Chip("tpu7x", r"tpu ?v?7x?$", 2, 2307, 192, 7380, 600),
    Chip("A100", r"a100", 1, 312, 80, 2039, 300),
    Chip("H100", r"h100", 1, 989, 80, 3350, 450),
    Chip("H200", r"h200", 1, 989, 141, 4800, 450),
)


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`; None for one outside the table (a CPU)."""
    return next((chip for chip in CHIPS if re.search(chip.pattern, device_kind.lower())), None)
