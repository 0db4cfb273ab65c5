"""Faults that users of RL systems report most: drift at learning rate 0, and routes that a resumed
run replays wrongly.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from replaying import GroupReplay
from tiny_run import tiny_run
from variants import VERIFIED

from compass_jax.base.records import Rollout
from compass_jax.config import named_correction
from compass_jax.experience import saved_samples
from compass_jax.model.moe import empty_routes
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.building import Building
from compass_jax.training.rl import run_rl
from compass_jax.training.session import RunState
from compass_jax.weights.checkpoint import CheckpointError, CheckpointMismatch

UNSET = 255


def configured(directory, **rl):
    base = tiny_run("odd_verifiers:coin")
    data = dataclasses.replace(base.data, eval_prompts=0)
    return evolve(base, run_dir=str(directory), data=data, rl={**rl})


def test_at_learning_rate_zero_nothing_drifts(tmp_path, monkeypatch):
    """Three steps of two updates at temperature 0.7 do not change the policy, and the mismatch is
    rounding.
    """
    config = configured(
        tmp_path,
        steps=3,
        updates_per_rollout=2,
        save_every=0,
        optim=dataclasses.replace(tiny_run().rl.optim, learning_rate=0.0),
    )
    run_rl(evolve(config, rollout={"temperature": 0.7}))
    rows = [
        json.loads(line)["metrics"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3 and all(m["grad_norm"] > 0 and m["entropy_nats"] > 0.1 for m in rows)
    for m in rows:
        assert m["mismatch/logp_abs_diff"] < 1e-5 and m["mismatch/extreme_frac"] == 0
        assert (
            m["policy/ratio_dev_max"] == 0
            and m["policy/clip_frac"] == 0
            and m["replay/flip_frac"] == 0
        )


class Trainer:
    """A trainer without a rollout, which saves and restores samples that are made by hand."""

    def __init__(self, config):
        with Telemetry(config.directory, 1, "rl") as telemetry:
            scorer = SimpleNamespace(workers=SimpleNamespace(tried_rows=set()))
            trainer = Building(config, scorer, RunState(), telemetry).trainer()
        self.buffer, self.rl, self.save = trainer.buffer, trainer.rl, trainer.save
        self.stream = trainer.parts.prompts.stream

    def interrupt(self, routes):
        """Saves the state of a stop in step 1 with rows 0 and 5 finished, of 12 and 30 tokens."""
        if not self.buffer.prompts:
            self.buffer.add(self.stream.next_batch(self.rl.prompts_per_step))
        prompts = list(self.buffer.prompts.values())
        zeros, versions = np.zeros(30, np.float32), np.zeros(30, np.int32)
        tokens = np.full(30, 9, np.int32)
        for row, n in ((0, 12), (5, 30)):
            part = (tokens[:n], zeros[:n], zeros[:n], True, versions[:n])
            self.buffer.put(Rollout(prompts[row // 4], row % 4, *part, row), done=True)
        self.buffer.routes.rows = None if routes is None else jnp.asarray(routes)
        self.save()


def recorded(config):
    """Returns a route store after a rollout: two experts of four for each input of the finished
    rows.
    """
    rows = config.rl.prompts_per_step * config.rl.capacity
    store = np.array(empty_routes(config.model, rows, config.rollout.max_length))
    store[0, :11], store[5, :29] = [2, 0], [1, 3]
    return store


@pytest.mark.parametrize("replay", ["R3", "R2", "off"])
def test_an_interrupted_rollout_comes_back_with_the_routes_that_its_replay_needs(tmp_path, replay):
    """R3 needs the rollout's routes; R2 and off store none and need none."""
    config = configured(tmp_path, replay=replay)
    first = Trainer(config)
    store = recorded(config) if replay == "R3" else None
    first.interrupt(store)
    saved = Trainer(config).buffer
    routes = saved.routes.rows
    assert sorted(x.rollout.row for x in saved.samples.values() if x.done) == [0, 5]
    assert (routes is None) == (replay != "R3")
    if store is not None:
        assert isinstance(routes, jax.Array)
        np.testing.assert_array_equal(routes, store)


def test_routes_tampered_with_in_a_checkpoint_are_refused_with_its_name(tmp_path):
    config = configured(tmp_path)
    first = Trainer(config)
    for at, value, message in (
        (
            (5, 20, 1),
            [3, 3],
            r"row 5 \(token, layer\): a repeated expert id at index \(20, 1\): \[3, 3\]",
        ),
        ((0, 2, 0), [1, 4], r"an expert id above 3 at index \(2, 0\): \[1, 4\]"),
        (
            (0, 11, 0),
            [1, 0],
            "row 0 has a route at token 11; of 12 tokens only the first 11 were inputs",
        ),
        ((0, 4, 0, 1), UNSET, r"a partly unset row at index \(4, 0\)"),
        ((slice(None),), 0, r"row 0 .* a repeated expert id at index \(0, 0\): \[0, 0\]"),
    ):
        store = recorded(config)
        store[at] = value
        first.interrupt(store)
        with pytest.raises(
            CheckpointError,
            match=(
                r"step_00000000: the routes of its interrupted rollout cannot be replayed:"
                rf" .*{message}"
            ),
        ):
            Trainer(config)


def test_samples_that_other_hooks_or_versions_left_are_refused(tmp_path, monkeypatch):
    """Otherwise the routes of further rows would be dropped, and their tokens be routed live."""
    config = configured(tmp_path)
    first = Trainer(config)
    first.interrupt(recorded(config))
    hooks = (GroupReplay(groups=4, max_age=2, max_route_age=1),)
    changed = evolve(
        config,
        rl={"hooks": hooks, "correction": named_correction("tis"), "zero_variance": VERIFIED},
    )
    with pytest.raises(CheckpointMismatch, match="16 rows, and this configuration has 32: rl"):
        Trainer(changed)
    monkeypatch.setattr(saved_samples, "state", lambda buffer: {"prompts": [], "scores": []})
    first.save()
    with pytest.raises(CheckpointMismatch, match="unfinished samples in the form of an earlier"):
        Trainer(config)
