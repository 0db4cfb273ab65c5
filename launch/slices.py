"""The TPU slices that Google Kubernetes Engine has, by name."""

import math
import re
from dataclasses import dataclass

CHIPS_PER_HOST = 4


class GkeError(ValueError):
    """An unusable setting; the message has the remedy."""


@dataclass(frozen=True)
class Generation:
    """The names of a generation of TPUs for GKE and xpk, and its slices."""

    accelerator: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    xpk: str  # prefix of xpk's --tpu-type
    small: tuple[str, ...]  # topologies up to those that the rule of cubes makes
    max_chips: int

    def known(self, topology: str) -> bool:
        """Returns whether the generation has such a slice: a listed one, or whole cubes of 4x4x4
        with ascending sides.
        """
        if topology in self.small:
            return True
        sides = (
            [int(side) for side in topology.split("x")]
            if re.fullmatch(r"\d{1,3}(x\d{1,3}){2}", topology)
            else [0]
        )
        ascending = sides == sorted(sides) and len(self.small[0].split("x")) == 3
        return (
            ascending
            and min(sides) > 0
            and all(side % 4 == 0 for side in sides)
            and math.prod(sides) <= self.max_chips
        )

    def listing(self) -> str:
        """Returns the known topologies, for an error message."""
        cubes = (
            f", 4x4x4, 4x4x8, 4x8x8 and so on: ascending multiples of 4, at most {self.max_chips:,}"
            " chips"
        )
        return ", ".join(self.small) + (cubes if len(self.small[0].split("x")) == 3 else "")


FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
GENERATIONS = {
    "v5e": Generation("tpu-v5-lite-podslice", "v5litepod", FLAT[1:], 256),
    "v5p": Generation("tpu-v5p-slice", "v5p", CUBES, 6144),
    "v6e": Generation("tpu-v6e-slice", "v6e", FLAT, 256),
    "tpu7x": Generation("tpu7x", "tpu7x", CUBES, 9216),
}


def slice_of(text: str) -> tuple[Generation, str, int]:
    """Returns the generation, topology and number of hosts of `v5p:4x4x4`."""
    name, _, topology = text.partition(":")
    if name not in GENERATIONS or not GENERATIONS[name].known(topology):
        known = "\n".join(f"  {n}: {g.listing()}" for n, g in GENERATIONS.items())
        raise GkeError(
            f"--topology {text} is not known; write GENERATION:TOPOLOGY, for example v5p:4x4x4."
            f" Known are\n{known}"
        )
    chips = math.prod(int(side) for side in topology.split("x"))
    return GENERATIONS[name], topology, chips // CHIPS_PER_HOST
