"""A transport of weights from outside the package, and the run that it serves."""

import jax
import jax.numpy as jnp
import numpy as np
from evolve import evolve
from tiny_run import tiny_run

from compass_jax.training.hand_over import WithinProcess, transport_of
from compass_jax.training.rl import rl_steps


class ThroughAFile:
    """Writes the rollout's weights to a file and reads them back."""

    is_local = True

    def __init__(self, engine, file):
        self.inner, self.file, self.versions = WithinProcess(engine), file, []

    def send(self, params, version):
        weights, metrics = self.inner.send(params, version)
        leaves, tree = jax.tree.flatten(weights)
        np.savez(self.file, *map(np.asarray, leaves))
        self.versions.append(version)
        with np.load(self.file) as read:
            leaves = [jnp.asarray(read[f"arr_{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(tree, leaves), metrics | {"handover/file": 1.0}


def metrics_of(directory, transport):
    config = evolve(tiny_run(), run_dir=str(directory), rl={"steps": 2})
    return [
        {k: v for k, v in step.metrics.items() if not k.startswith(("time/", "memory/"))}
        for step in rl_steps(config, transport=transport)
    ]


def test_a_transport_from_outside_serves_a_run(tmp_path):
    """Its samples and updates are those of this package's transport, bit for bit."""
    transports = []

    def through_a_file(engine):
        transports.append(ThroughAFile(engine, tmp_path / "weights.npz"))
        return transports[0]

    expected = metrics_of(tmp_path / "usual", transport_of)
    actual = metrics_of(tmp_path / "own", through_a_file)
    assert all(step.pop("handover/file") == 1 for step in actual)
    for steps in (expected, actual):
        for step in steps:
            step.pop("train/tokens_per_s"), step.pop("rollout/tokens_per_s", None)
    assert actual == expected and transports[0].versions == [0, 1, 2]
