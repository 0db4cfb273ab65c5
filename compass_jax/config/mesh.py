"""Settings of the mesh: the number of devices along each axis."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Annotated, Self

from compass_jax.config.errors import check
from compass_jax.config.model import ModelConfig
from compass_jax.config.ranges import Range, Section

Devices = Annotated[int, Range(1, 2**20)]


@dataclass(frozen=True)
class MeshConfig(Section):
    """Number of devices along each axis; their product is the size of the mesh. All 1: one device,
    without a mesh.

    Sequences are split over replica, fsdp and expert together, and their tokens over context.

        replica   whole copies of the parameters
        fsdp      the parameters' hidden axis in storage, gathered layer by layer
        expert    experts; tokens are sent to the devices of their experts
        tensor    heads, the inner axis of MLPs, the vocabulary
        context   in training the tokens of a row, and with fsdp the hidden axis in storage; in
            decoding the slots
    """

    replica: Devices = 1
    """Number of groups of devices that each hold a whole copy of the parameters."""
    fsdp: Devices = 1
    """Number of devices that share the storage of the parameters, split along the hidden axis."""
    expert: Devices = 1
    """Number of devices that share the experts; tokens are exchanged between them."""
    tensor: Devices = 1
    """Number of devices that share the heads, the inner axis of the MLPs and the vocabulary."""
    context: Devices = 1
    """Number of devices that share a row's tokens and the storage with fsdp in training, and the
    slots in decoding.
    """

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return math.prod(astuple(self))

    def validate(self, key: str | None = None, model: ModelConfig | None = None) -> Self:
        """Returns self. Raises ConfigError, with both sizes, for an axis that does not divide its
        array.
        """
        super().validate(key)
        if model is not None:
            self._check_model(f"{key}", model)
        return self

    def _check_model(self, key: str, model: ModelConfig) -> None:
        stored = self.fsdp * self.context
        check(
            model.hidden % stored == 0,
            f"{key}.fsdp = {self.fsdp} times {key}.context = {self.context} does not divide"
            f" model.hidden = {model.hidden}, which both store in parts",
        )
        for name in ("kv_rank", "q_rank") if model.mla is not None else ():
            rank = getattr(model.mla, name)
            check(
                rank % stored == 0,
                f"{key}.fsdp = {self.fsdp} times {key}.context = {self.context} does not divide"
                f" model.mla.{name} = {rank}, whose matrices both store in parts",
            )
        check(
            bool(model.moe_layers) or self.expert == 1,
            f"{key}.expert = {self.expert}: the model has no experts; give these devices to fsdp",
        )
        sizes = {
            "model.heads": (self.tensor, model.heads),
            "model.kv_heads": (self.tensor, model.kv_heads),
            "model.vocab_size": (self.tensor, model.vocab_size),
        }
        if len(model.moe_layers) < model.layers:
            sizes["model.ffn"] = (self.tensor, model.ffn)
        if model.moe_layers:
            sizes["model.moe.ffn"] = (self.tensor, model.mixture.ffn)
            sizes["model.moe.shared_ffn"] = (self.tensor, model.mixture.shared_ffn)
            sizes["model.moe.experts"] = (self.expert, model.mixture.experts)
        for name, (n, size) in sizes.items():
            axis = "expert" if name.endswith("experts") else "tensor"
            check(size % n == 0, f"{key}.{axis} = {n} does not divide {name} = {size}")
