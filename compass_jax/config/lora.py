"""Settings of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from compass_jax.config.errors import check
from compass_jax.config.ranges import Range, Section

Target = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"
]


@dataclass(frozen=True)
class LoRAConfig(Section):
    """Low-rank adapters, which are trained instead of the model's weights (LoRA, arXiv
    2106.09685).
    """

    KEY: ClassVar[str] = "lora"

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of the adapters (a number of channels); 0: train all weights."""
    alpha: Annotated[float, Range(0, 1e6, above=True)] = 32.0
    """Scale of the adapters (a factor): their product is multiplied by alpha / rank."""
    targets: tuple[Target, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Matrices that get an adapter: those of attention, dense MLPs and shared experts by name, and
    experts for every matrix of every routed expert. In multi-head latent attention q_proj names
    both matrices of queries, and k_proj or v_proj those that keys and values have in common.
    """

    @property
    def acts(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor of the adapters' product, alpha / rank."""
        return self.alpha / self.rank

    def _check(self, key: str) -> None:
        check(
            self.acts or self == LoRAConfig(),
            f"{key}.rank = 0 trains all weights, so {key}.alpha and {key}.targets would do nothing:"
            f" set {key}.rank, such as 16",
        )
        check(bool(self.targets), f"{key}.targets is empty: name a matrix, such as q_proj")
        check(
            len(set(self.targets)) == len(self.targets),
            f"{key}.targets = {self.targets}: names a matrix twice",
        )
