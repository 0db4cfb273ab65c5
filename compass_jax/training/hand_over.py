"""The rollout's weights, and their hand-over after each step's updates."""

from __future__ import annotations

from compass_jax.aliases import Tree
from compass_jax.rollout.engine import Engine
from compass_jax.samplers.remote import RemoteEngine
from compass_jax.training.learner import Learner
from compass_jax.training.own_judge import PolicyJudge
from compass_jax.weights.sync import sync_weights


class RolloutWeights:
    """The weights with which `engine` samples: those of this process's devices, or those that
    samplers on other hosts have received. A judge that is the policy uses them too.
    """

    def __init__(self, engine: Engine, judge: PolicyJudge):
        self._engine, self._judge = engine, judge
        self.params: Tree = None

    def sync(self, learner: Learner) -> dict[str, float]:
        """Takes the learner's parameters over; returns the bytes and seconds that it took."""
        engine = self._engine
        # The old weights are no longer needed: their memory is free for the new ones.
        self.params = None
        self._judge.use(None, learner.version)
        if isinstance(engine, RemoteEngine):
            self.params, metrics = engine.receive(learner.params, learner.version)
            return metrics
        self.params, metrics = sync_weights(
            learner.params,
            engine.model_config,
            engine.compute.dtype,
            engine.config.quantize,
            placement=engine.placement,
            layout=engine.layout,
        )
        self._judge.use(self.params, learner.version)
        return metrics
