"""Sliding windows of attention in a Hugging Face `config.json`: `sliding_window`, the flag
`use_sliding_window`, and the kind of each layer, `layer_types`.
"""

from __future__ import annotations

from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.config import ModelConfig
from compass_jax.model.families.raw import Raw, WeightsError, unsupported

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Windows(NamedTuple):
    """The sliding windows that a family's class has.

    Args:
        acts: `sliding_window` limits the positions that a token sees.
        by_layer: `layer_types` names the layers with a window; else every layer has one.
    """

    acts: bool = False
    by_layer: bool = False

    def problems(self, raw: Raw) -> list[str]:
        """Returns a message for each key that says otherwise."""
        window, used = raw.get("sliding_window"), raw.get("use_sliding_window")
        kinds, limited = raw.get("layer_types"), self.acts and window is not None
        allowed = sorted({_SLIDING if limited else _FULL, *([_FULL] if self.by_layer else [])})
        is_allowed = isinstance(kinds, list) and all(kind in allowed for kind in kinds)
        names = " or ".join(map(repr, allowed))
        full = "false; every layer attends to the whole sequence"
        acts = f"absent, because the window of {window} acts all the same; or a null window"
        ignored = window is None or used is False
        rules = (
            ("use_sliding_window", self.acts or used in (None, False), full),
            ("sliding_window", self.acts or ignored, f"null, or use_sliding_window {full}"),
            ("use_sliding_window", not limited or used in (None, True), acts),
            ("layer_types", kinds is None or is_allowed, f"{names} in every layer"),
        )
        return [unsupported(key, raw.get(key), hint) for key, fits, hint in rules if not fits]

    def read(self, raw: Raw, layers: int, key: str) -> JsonObject:
        """Returns the fields of ModelConfig; `key` is that of `layers`. Raises WeightsError for
        malformed keys.
        """
        kinds, window = raw.get("layer_types"), 0
        if kinds is not None and len(kinds) != layers:
            raise WeightsError(
                f"{raw.where}: layer_types has {len(kinds)} entries, {key} is {layers}"
            )
        if self.acts and raw.get("sliding_window") is not None:
            window = raw.integer("sliding_window")
            if window < 1:
                raise WeightsError(f"{raw.where}: sliding_window = {window}: must be positive")
        if self.by_layer and kinds is None:
            raise WeightsError(f"{raw.where} has no layer_types")
        full = tuple(i for i, kind in enumerate(kinds or ()) if kind == _FULL)
        if not window or len(full) == layers:
            return {}
        return {"sliding_window": window, "full_attention_layers": full}

    def unexported(self, config: ModelConfig) -> str:
        """Returns why a config.json of the class cannot describe the model's windows; empty where
        it can.
        """
        if config.sliding_window and not self.acts:
            return f"model.sliding_window = {config.sliding_window}: the class has no window"
        if config.full_attention_layers and not self.by_layer:
            return "model.full_attention_layers: the class has the same window in every layer"
        return ""

    def to_config(self, config: ModelConfig) -> JsonObject:
        """Returns the keys of config.json."""
        if not self.acts:  # classes without use_sliding_window may have a default window
            return {"use_sliding_window": False, "sliding_window": None}
        values: JsonObject = {"sliding_window": config.sliding_window or None}
        if self.by_layer:
            windows = [config.window_of(i) for i in range(config.layers)]
            values["layer_types"] = [_SLIDING if window else _FULL for window in windows]
        return values
