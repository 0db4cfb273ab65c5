"""Settings of the mesh: how many devices work along which axis."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Annotated

from compass_jax.config.errors import check
from compass_jax.config.model import ModelConfig
from compass_jax.config.ranges import Range, check_fields

Devices = Annotated[int, Range(1, 2**20)]


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices of the mesh. 1 everywhere:
    one device, and no mesh.

    Sequences are split over replica, fsdp and expert together, their tokens over context. replica:
    whole copies of the parameters. fsdp: the parameters' hidden axis in storage, gathered layer by
    layer. expert: experts; their tokens travel. tensor: heads, the inner axis of MLPs, the
    vocabulary. context: the tokens of a row in training, and the hidden axis in storage with fsdp;
    in decoding its devices take slots.
    """

    replica: Devices = 1
    """So many groups of devices each hold a whole copy of the parameters."""
    fsdp: Devices = 1
    """So many devices share the storage of the parameters, split along the hidden axis."""
    expert: Devices = 1
    """So many devices share the experts; the tokens travel between them."""
    tensor: Devices = 1
    """So many devices share the heads, the inner axis of the MLPs and the vocabulary."""
    context: Devices = 1
    """So many devices share the tokens of a row in training, and the storage with fsdp; in decoding
    they share the slots.
    """

    @property
    def devices(self) -> int:
        """Of the whole mesh."""
        return math.prod(astuple(self))

    def validate(self, key: str, model: ModelConfig) -> None:
        """Raises ConfigError, with both sizes, where an axis of the model does not divide."""
        check_fields(self, key)
        stored = self.fsdp * self.context
        check(
            model.hidden % stored == 0,
            f"{key}.fsdp = {self.fsdp} times {key}.context = {self.context} does not divide"
            f" model.hidden = {model.hidden}, which both store in parts",
        )
        sizes = []
        sizes += [
            ("tensor", name, size)
            for name, size in (("model.heads", model.heads), ("model.kv_heads", model.kv_heads))
        ]
        sizes += [("tensor", "model.vocab_size", model.vocab_size)]
        if len(model.moe_layers) < model.layers:
            sizes += [("tensor", "model.ffn", model.ffn)]
        if model.moe_layers:
            sizes += [
                ("tensor", "model.moe.ffn", model.mixture.ffn),
                ("expert", "model.moe.experts", model.mixture.experts),
            ]
        else:
            check(
                self.expert == 1,
                f"{key}.expert = {self.expert}: the model has no experts; give these devices to"
                " fsdp",
            )
        for axis, name, size in sizes:
            n = getattr(self, axis)
            check(size % n == 0, f"{key}.{axis} = {n} does not divide {name} = {size}")
