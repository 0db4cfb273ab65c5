"""Resumed runs: after a stop or a kill a run ends with the numbers and samples of an undisturbed
run, in every variant, and no sample whose score is in the checkpoint is scored again.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from stops import (
    Killed,
    at_call,
    kill_after_step,
    kill_in_training,
    stop_after_step,
    stop_at_call,
    stop_at_sample,
)
from tiny_run import tiny_run
from variants import configured, limit_lengths

from compass_jax.base.records import SampleKey
from compass_jax.rewards.score import Scorer
from compass_jax.training import step
from compass_jax.training.rl import run_rl
from compass_jax.training.saved import IN_FLIGHT, OF, SavedRun
from compass_jax.weights import checkpoint
from compass_jax.weights.checkpoint import Checkpoints
from compass_jax.weights.manifest import META

# How an interrupted run is compared. EXACT: every number, bit for bit. MISMATCH: the same, except
# the metrics of mismatch/, since a rollout that is cut in two runs in other slots, which changes
# the last bits of the sampler's log-probs. CLOSE: to a relative difference of 1e-5, for the same
# reason.
EXACT, MISMATCH, CLOSE = "exact", "mismatch", "close"


def case(variant, end, at, saved, pending=None, compare=EXACT, **rl: Any):
    """Returns a row of the table: the step of the checkpoint that is left, and its prompts in
    flight.
    """
    name = f"{variant}: {end.__name__}({at})"
    return pytest.param(variant, end, at, saved, pending, compare, rl, id=name)


def stop_in(patch, call):
    """Stops after a call of one of the training's programs, for example ("pull", 3)."""
    stop_at_call(patch, step, *call)


QUICK = [
    case("plain", stop_at_sample, 19, 1, 4, CLOSE),  # sample 3 of step 2
    # The first of step 2's two micro-batches: the rollout is kept, and its gradient is lost.
    case("plain", stop_in, ("pull", 3), 1, 4),
    case("growing", stop_at_sample, 18, 0, 4, CLOSE),  # step 1, while uniform groups grow
    case("dynamic", stop_at_sample, 36, 1, 16, CLOSE),  # the second round of step 2
    case("stages", stop_after_step, 2, 2),  # between two stages
    case("posterior", stop_after_step, 1, 1),
    case("posterior", stop_at_sample, 19, 1, 4, CLOSE),
    case("state", kill_after_step, 2, 1),
    case("screening", stop_at_sample, 17, 1, 4, CLOSE),  # step 2, before all first samples are done
    case("average", kill_in_training, 3, 2),
    case("rates", kill_after_step, 2, 1),
    # Step 6, whose temperature is a higher one.
    case("entropy", stop_at_sample, 90, 5, 4, CLOSE),
    case("rounds", stop_at_sample, 45, 1, None, CLOSE),
    case("rounds", kill_in_training, 2, 1),
    # The predictions of a rollout whose update was lost are saved with its groups.
    case("prediction", stop_in, ("pull", 3), 1, 4),
    case("prediction", kill_in_training, 3, 2, 0),
    # The second rollout is finished while step 1 trains, and is saved with it.
    case("one step off", stop_after_step, 1, 1, 4),
    # A stop waits for the end of a partial rollout, whose ticks decide which samples are cut.
    case("partial", stop_at_sample, 20, 1, 7),
    case("partial", kill_in_training, 2, 1, 3),
    case("replay", kill_in_training, 3, 2, 0),
    case("drafts", stop_at_sample, 40, 2, 4, CLOSE),  # step 3, most of whose samples have drafts
    case("drafts", kill_after_step, 3, 2),
]
SLOW = [
    case("plain", stop_at_sample, 32, 1, 4, CLOSE),  # the last sample of step 2
    case("plain", stop_in, ("forward_and_pullback", 3), 1, 4),
    case("plain", stop_in, ("apply", 1), 1),
    case("plain", stop_after_step, 1, 1, save_every=0),
    case("dynamic", stop_at_sample, 3, 0, 8, CLOSE),
    case("state", stop_at_sample, 19, 1, 4, CLOSE),
    case("stages", stop_after_step, 1, 1),
    case("stages", stop_after_step, 3, 3),
    # Step 2 ends a stage, with samples 17 to 32; step 3 begins one, with samples 33 to 56.
    case("stages", stop_at_sample, 20, 1, 4, MISMATCH),
    case("stages", stop_at_sample, 40, 2, 4, MISMATCH),
    case("stages", kill_after_step, 3, 2),
    case("one step off", kill_in_training, 2, 1, 4),
    case("one step off, dynamic", stop_after_step, 1, 1),
    case("one step off, growing", stop_after_step, 1, 1),
    case("screening", stop_at_sample, 10, 0, 4, CLOSE),  # step 1, while groups continue
    case("prediction", stop_at_sample, 17, 1, 4, CLOSE),  # step 2, while groups continue
    case("one step off, screening", stop_after_step, 1, 1),
    case("rounds", stop_at_sample, 12, 0, None, CLOSE),
    case("one step off, rounds", kill_in_training, 2, 1),
    case("one step off, rounds", stop_after_step, 2, 2),
    case("rates", stop_at_sample, 19, 1, 4, CLOSE),
    case("one step off, rates", kill_in_training, 2, 1, 4),
    case("entropy", kill_in_training, 6, 5),
    case("one step off, entropy", kill_in_training, 6, 5, 4),
    case("one step off, entropy", stop_after_step, 5, 5, 4),
    case("one step off, rates", stop_after_step, 2, 2, 4),
    case("one step off, screening", kill_in_training, 2, 1, 4),
    case("replay", stop_in, ("pull", 5), 2, 4),  # within the update of step 3
    case("replay", stop_after_step, 2, 2, 0),
    case("replay, live", stop_at_sample, 40, 2, 4, CLOSE),
    case("replay, R2", kill_after_step, 3, 2, 0),
    case("replay, drafts", kill_in_training, 4, 3, 0),
    case("replay, one step off", kill_in_training, 3, 2, 4),
    case("replay, one step off", stop_after_step, 2, 2, 4),
    case("partial, replay", kill_in_training, 3, 2, 3),
    case("partial", stop_at_sample, 3, 0, 7),
    case("partial", stop_after_step, 1, 1, 3),
    case("partial, one step off", kill_in_training, 2, 1, 7),
    case("drafts", stop_at_sample, 50, 3, 4, CLOSE),
    case("one step off, drafts", stop_after_step, 2, 2, 4),
    case("one step off, drafts", kill_in_training, 3, 2, 4),
    case("partial, drafts", stop_after_step, 2, 2, 3),
    case("partial, drafts", kill_in_training, 3, 2, 3),
]
CASES = [*QUICK, *(pytest.param(*x.values, id=x.id, marks=pytest.mark.slow) for x in SLOW)]


@pytest.mark.parametrize(("variant", "end", "at", "saved", "pending", "compare", "rl"), CASES)
def test_a_run_goes_on(
    undisturbed, tmp_path, monkeypatch, variant, end, at, saved, pending, compare, rl
):
    expected, _ = undisturbed(variant)
    config = configured(variant, tmp_path, **rl)
    if variant.startswith("partial"):
        limit_lengths(monkeypatch)
    with monkeypatch.context() as patch:
        end(patch, at)
        if "kill" in end.__name__:
            with pytest.raises(Killed):
                run_rl(config)
        else:
            result = run_rl(config)
            assert result["stopped"] and result["steps"] == saved and "evaluation" not in result
    assert checkpoint.latest(tmp_path) == saved
    alone = tmp_path / IN_FLIGHT  # samples whose learner is in an earlier checkpoint
    newest = alone if alone.is_dir() and checkpoint.latest(alone) == saved else tmp_path
    scored = check_pending(checkpoint.read_meta(newest)["pending"], pending)
    if variant == "plain" and saved and end in (stop_at_sample, stop_in) and at != ("apply", 1):
        # A stop within a step after a checkpoint does not write the learner again.
        assert newest == alone and size_of(alone) < 0.2 * size_of(tmp_path / "checkpoints")
    submitted = at_call(monkeypatch, Scorer, "submit", 0, lambda: None)
    assert not run_rl(config)["stopped"]
    keys = {key for _, key, *_ in submitted if isinstance(key, SampleKey)}  # not of an evaluation
    assert not scored & keys
    for name in ("rollouts", "tokens") if compare == EXACT else ("rollouts",):
        assert lines(tmp_path, name) == lines(expected, name)
    selectors = [checkpoint.read_meta(x)["selector"] for x in (tmp_path, expected)]
    assert selectors[0] == selectors[1]
    rows, expected_rows = numbers(tmp_path), numbers(expected)
    assert len(rows) == len(expected_rows)
    for actual_row, expected_row in zip(rows, expected_rows, strict=True):
        assert_same(actual_row, expected_row, compare)
    if "replay" in variant:
        assert any(row["earlier/groups"] for row in rows[saved:])


def test_samples_after_another_checkpoint_are_not_taken(tmp_path):
    """Those of a run whose checkpoints were removed, in the same folder and of the same step."""
    saved = SavedRun(evolve(tiny_run(), run_dir=str(tmp_path)), *[None] * 6)

    def save(folder, of):
        with Checkpoints(folder, saved.config.model) as checkpoints:
            checkpoints.save(1, {"x": jnp.zeros(1)}, {OF: of}, wait=True)
        return checkpoint.find(folder, 1)

    newest = save(tmp_path, "")
    assert saved.newest_samples(newest) is newest
    save(tmp_path / IN_FLIGHT, "another checkpoint's digest")
    assert saved.newest_samples(newest) is newest
    samples = save(tmp_path / IN_FLIGHT, newest.manifest.files[META].value)
    assert saved.newest_samples(newest).path == samples.path


def size_of(folder):
    """Returns the bytes of the files below a folder."""
    return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())


def check_pending(pending, prompts):
    """Checks the number of prompts in flight; returns the keys of the samples with a score."""
    if pending is None:
        assert not prompts
        return set()
    if prompts is not None:
        assert len(pending["prompts"]) == prompts
    return {SampleKey(*x["key"]) for x in pending["samples"] if x["score"] is not None}


def assert_same(actual, expected, compare):
    """Checks the numbers of a step."""
    assert actual.keys() == expected.keys()
    for name in expected:
        if compare == CLOSE:
            np.testing.assert_allclose(
                actual[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name
            )
        elif compare == EXACT or not name.startswith("mismatch/"):
            assert actual[name] == expected[name], name
