"""A user's router in one file outside the package, with a family that can write it: it trains, its
routes are replayed, and a family without it refuses it.
"""

from dataclasses import replace

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run
from worded import override

from compass_jax.config import ConfigError, Router, seam_class
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.model.families.find import find
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.training.rl import run_rl

MINE = """
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from compass_jax.config import Router
from compass_jax.model.families.qwen3_moe import FAMILY as QWEN
from compass_jax.model.routers.inputs import at_ids


@dataclass(frozen=True)
class Squared(Router):
    power: float = 2.0

    def gates(self, inputs, ids):
        gates = at_ids(self.probs(inputs), ids)
        return gates / jnp.sum(gates, axis=-1, keepdims=True)

    def probs(self, inputs):
        return jax.nn.softmax(self.power * inputs.logits, axis=-1)


FAMILY = replace(QWEN, router=__file__ + ":Squared", router_keys={"power": "router_power"})
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def with_router(config, router, family=None):
    moe = replace(config.model.mixture, router=router)
    return evolve(config, model=replace(config.model, moe=moe, family=family or "qwen3_moe"))


def test_it_trains_two_steps_and_its_routes_are_replayed(file, tmp_path):
    config = with_router(tiny_run(), seam_class(Router, f"{file}:Squared")(), f"{file}:FAMILY")
    changed = override(config, ["--model.moe.router.power", "3"])
    assert changed.model.mixture.router.power == 3.0
    assert config_from_json(config_to_json(changed)) == changed
    run_rl(evolve(config, run_dir=str(tmp_path / "run")))
    steps = [row["metrics"] for row in lines(tmp_path / "run")]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert all(step["replay/unset_frac"] == 0 for step in steps)
    assert steps[0]["mismatch/logp_abs_diff"] < 1e-4  # rollout and training route alike
    family = find(f"{file}:FAMILY")
    raw = family.write(changed.model, "float32", {})
    assert raw["router_power"] == 3.0 and family.read(raw, "config.json", "x").mixture.router == (
        changed.model.mixture.router
    )


def test_the_sigmoid_router_trains_and_its_bias_stays(tmp_path, file):
    text = MINE.replace(
        'router=__file__ + ":Squared", router_keys={"power": "router_power"}', "router='sigmoid'"
    )
    path = tmp_path / "sigmoid.py"
    path.write_text(text)
    config = with_router(tiny_run(), Sigmoid(), f"{path}:FAMILY")
    result = run_rl(evolve(config, run_dir=str(tmp_path / "run")))
    assert result["steps"] == 2 and result["grad_norm"] > 0


def test_a_family_without_the_router_refuses_it(file):
    config = with_router(tiny_run(), Sigmoid())
    with pytest.raises(ConfigError, match="the family qwen3_moe has the router softmax"):
        run_rl(config)
    assert override(tiny_run(), ["--model.moe.router", "sigmoid"]).model.mixture.router == Sigmoid()
    dense = evolve(tiny_run(), model=replace(tiny_run().model, family="qwen3", moe=None))
    with pytest.raises(ConfigError, match="the model is dense and has no router"):
        override(dense, ["--model.moe.router", "sigmoid"])
