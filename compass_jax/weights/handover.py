"""Training parameters -> rollout parameters in one jitted function, never through the host; 8-bit weights are emulated on CPU alone."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax

from compass_jax.model.params import to_decode
from compass_jax.model.quantize import eight_bit, emulate, kind_for


@partial(jax.jit, static_argnames=("dtype", "quantize", "stored"))
def _convert(params: Any, dtype: str, quantize: str, stored: bool) -> Any:
    return (eight_bit if stored else emulate)(to_decode(params), quantize, dtype)


def resolve(quantize: str) -> str:
    """rollout.quantize with "auto" as what the first device multiplies fast."""
    return kind_for(jax.devices()[0].device_kind) if quantize == "auto" else quantize


def hand_over(params: Any, dtype: str, quantize: str = "off", stored: bool | None = None) -> tuple[Any, dict[str, float]]:
    """The decoding copy (decode layout, in `dtype`) of training parameters in either layout; and its bytes and seconds.

    quantize: rollout.quantize; the scales come from the unrounded parameters. stored: 8-bit weights as values and scales (model/quantize.py);
    else emulated; None: stored unless this is a CPU.
    """
    started, stored = time.perf_counter(), jax.default_backend() != "cpu" if stored is None else stored
    decode = jax.block_until_ready(_convert(params, dtype, resolve(quantize), stored))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(decode))
    return decode, {"handover/bytes": float(size), "time/handover_s": time.perf_counter() - started}
