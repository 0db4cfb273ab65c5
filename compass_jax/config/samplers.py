"""Settings of disaggregated rollout over hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compass_jax.config.errors import check
from compass_jax.config.ranges import Section


@dataclass(frozen=True)
class SamplersConfig(Section):
    """Samplers in other processes, each started by `compass sample ADDRESS`. They get the weights
    after every step, and return samples with log-probs and routes.

    Samplers may come and go: the samples of a lost one are sampled again by another, with the same
    random numbers.
    """

    KEY: ClassVar[str] = "samplers"

    address: str = ""
    """Address host:port at which process 0 of the training waits for samplers, and for the other
    processes of the training; empty: the training's processes sample.
    """
    lockstep: bool = True
    """Synchronous weight sync: weights change between two rollouts only, and a run repeats exactly;
    False (with rl.one_step_off): unfinished samples continue under new weights.
    """

    @property
    def acts(self) -> bool:
        """Whether samplers generate the rollouts."""
        return bool(self.address)

    def _check(self, key: str) -> None:
        if self.acts:
            parse_address(self.address, f"{key}.address")


def parse_address(address: str, name: str) -> tuple[str, int]:
    """Returns host and port. Raises ConfigError, naming the setting, unless it is host:port."""
    host, _, port = address.rpartition(":")
    check(
        bool(host) and port.isdigit() and 0 < int(port) < 65536,
        f"{name} = {address!r}: must be host:port of process 0 of the training",
    )
    return host, int(port)
