"""`quantization_config` in a Hugging Face `config.json`: the kinds of weights that are dequantised
at import (weights/dequantize.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from compass_jax.model.families.raw import unsupported

_SUPPORTED = (
    "unquantised weights; quant_method 'fp8' with fmt 'e4m3', activation_scheme 'dynamic' and"
    " weight_block_size [128, 128]; quant_method 'mxfp4'"
)
# Values that do not change how stored weights are read: modules that stay floats have no scales.
_WITHOUT_EFFECT = {"modules_to_not_convert", "ignored_layers", "dequantize", "scale_fmt"}
_KINDS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "fp8": {
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
        "weight_block_size": ([128, 128],),
    },
    "mxfp4": {},
}


def quantization_problems(value: object) -> list[str]:
    """Returns a message for quantised weights of a kind that is not dequantised."""
    fits = value is None
    if isinstance(value, dict) and str(value.get("quant_method")) in _KINDS:
        kinds = _KINDS[str(value["quant_method"])]
        fits = all(value.get(key) in allowed for key, allowed in kinds.items())
        fits = fits and value.keys() <= {*kinds, *_WITHOUT_EFFECT, "quant_method"}
    return [] if fits else [unsupported("quantization_config", value, _SUPPORTED)]
