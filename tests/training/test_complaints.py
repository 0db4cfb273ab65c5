"""What users of such systems complain about most, and which test would see it here.

Resume lies
    checkpoints identical to the first one; resume from 0; the optimiser started anew; prompts
        skipped over restarts
        training/test_resume.py: test_a_kill_changes_no_number
        training/test_loop.py: test_a_stop_request_during_a_rollout_loses_nothing
        here: test_an_interrupted_rollout_comes_back_with_the_routes_that_its_replay_needs
    a flag that is ignored
        test_config.py: test_no_setting_is_ignored
        commands/test_cli.py: test_wrong_overrides_are_told_and_exit_with_2
    another model's checkpoint accepted
        training/test_loop.py:
            test_a_run_directory_serves_one_process_one_model_and_one_configuration
        weights/test_checkpoint.py: test_another_model_is_refused_by_field
Rewards
    a verifier that hangs the driver, or silently scores everything 0
        rewards/test_score.py: test_hang_crash_and_exception_cost_only_their_own_sample
        training/test_notices.py: test_counts_of_a_step_and_each_thing_said_once
    rewards shuffled against samples by batching
        training/test_loop.py: test_a_run_writes_metrics_rollouts_and_checkpoints
        experience/test_assemble.py: test_each_row_holds_its_sample
    one failed rollout kills the step
        training/test_loop.py: test_samples_without_a_verdict_are_left_out_and_counted
    a wait that never ends
        rewards/test_score.py: test_workers_that_are_always_killed_end_the_wait
Mismatch and collapse
    a gap of log-probs that grows at learning rate 0; temperature on one side alone
        here: test_at_learning_rate_zero_nothing_drifts
        rollout/test_engine.py: test_log_probs_and_entropies_are_those_of_the_training_forward
    the same random key at every decoding step
        rollout/test_collect.py: test_the_draws_of_one_sequence_are_not_one_draw_repeated
    weights in the wrong layer
        weights/test_sync.py: test_every_layer_gets_its_own_weights
        weights/test_hf.py: test_each_tensor_lands_in_its_layer_and_expert
Batching
    the size of a micro-batch changes the loss
        training/test_step.py: test_no_split_into_buckets_or_micro_batches_changes_the_gradient
    the last, smaller batch has another shape
        rl/test_bucketing.py: test_every_row_is_placed_once_in_an_allowed_shape
    a mask per rollout where it should be per group
        rl/test_weights.py: test_token_mean_by_hand
        rl/test_zero_variance.py: test_kinds_by_hand
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny_run

from compass_jax.model.moe import empty_routes
from compass_jax.records import Rollout
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.loop import RLTrainer
from compass_jax.training.rl import run_rl
from compass_jax.weights.checkpoint import CheckpointError

UNSET = 255


def test_every_test_that_the_table_names_exists():
    tests, rows = (
        Path(__file__).parent.parent,
        re.findall(r"^ +(here|[\w/]+\.py): (test_\w+)$", __doc__, re.MULTILINE),
    )
    files = [
        (tests / ("training/test_complaints.py" if file == "here" else file), name)
        for file, name in rows
    ]
    assert (
        len(rows) >= 20
        and [name for file, name in files if f"def {name}(" not in file.read_text()] == []
    )


def configured(directory, **rl):
    base = tiny_run("odd_verifiers:coin")
    data = dataclasses.replace(base.data, eval_prompts=0)
    return dataclasses.replace(
        base, run_dir=str(directory), data=data, rl=dataclasses.replace(base.rl, **rl)
    )


def test_at_learning_rate_zero_nothing_drifts(tmp_path, monkeypatch):
    """Three steps of two updates at temperature 0.7: the gap stays rounding, the policy stays where
    it was.
    """
    config = configured(
        tmp_path,
        steps=3,
        updates_per_rollout=2,
        save_every=0,
        optim=dataclasses.replace(tiny_run().rl.optim, learning_rate=0.0),
    )
    run_rl(
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, temperature=0.7))
    )
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


class Trainer(RLTrainer):
    """A trainer that never rolls out: what it saves and restores is made by hand."""

    def __init__(self, config):
        with Telemetry(config.directory, 1, "rl") as telemetry:
            super().__init__(config, None, None, telemetry)

    def interrupt(self, routes):
        """As after a stop in step 1 with rows 0 and 5 finished, of 12 and 30 tokens."""
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
    """A store as the rollout leaves it: two experts of four for each input of the finished rows."""
    rows = config.rl.prompts_per_step * config.rl.capacity
    store = np.array(empty_routes(config.model, rows, config.rollout.max_length))
    store[0, :11], store[5, :29] = [2, 0], [1, 3]
    return store


@pytest.mark.parametrize("replay", ["R3", "R2", "off"])
def test_an_interrupted_rollout_comes_back_with_the_routes_that_its_replay_needs(tmp_path, replay):
    """R3 has the rollout's routes; R2 and off kept none, and none are asked for."""
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
