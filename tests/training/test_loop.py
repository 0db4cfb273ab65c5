"""Real tiny RL runs: their files, failing verifiers, non-finite gradients, and extensions."""

import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import odd_verifiers
import pytest
from evolve import evolve
from logged import lines, numbers
from tiny_run import tiny_run

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience import metrics
from compass_jax.experience.paired import read_evaluation
from compass_jax.model.transformer import init_params
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.runs.rundir import ConfigMismatch, RunDir, RunDirectoryInUse
from compass_jax.training import step
from compass_jax.training.optim import TrainingDiverged
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint


def configured(directory, verifier="coin", **rl):
    config = tiny_run(f"odd_verifiers:{verifier}")
    return evolve(config, run_dir=str(directory), rl={**rl})


@pytest.fixture(scope="module")
def plain(undisturbed):
    """Returns the directory and the result of a run of two steps."""
    return undisturbed("plain")


NAMES = (
    "reward/mean",
    "reward/timeout_frac",
    "zero_variance/rate_all_right",
    "zero_variance/rate_all_wrong",
    "waste/tokens_generated",
    "waste/frac_verifier_signal",
    "waste/frac_shaping_signal",
    "waste/frac_entropy_signal",
    "waste/frac_prediction_signal",
    "waste/frac_none",
    "response_length/mean",
    "response_length/max",
    "truncated_frac",
    "entropy_nats",
    "policy/kl_k3",
    "policy/clip_frac",
    "policy/ratio_max",
    "mismatch/logp_abs_diff",
    "mismatch/kl_k3",
    "mismatch/extreme_frac",
    "mismatch/ess",
    "replay/flip_frac",
    "replay/unset_frac",
    "moe/load_max_over_mean",
    "grad_norm",
    "lr",
    "loss",
    "rollout/tokens_per_s",
    "rollout/slot_occupancy",
    "train/tokens_per_s",
    "policy_version",
    "staleness",
    "time/rollout_s",
    "time/score_s",
    "time/update_s",
    "time/handover_s",
    "advantage/inversion_frac",
    "repetition_frac",
)


def test_a_run_writes_metrics_rollouts_and_checkpoints(plain):
    directory, result = plain
    rows = lines(directory)
    assert [(row["stage"], row["step"]) for row in rows] == [("rl", 1), ("rl", 2)]
    last = json.loads((directory / "evaluation.json").read_text())
    assert last["step"] == 2
    assert last["metrics"]["eval/heldout/avg_at_k"] == result["evaluation"].avg_at_k
    evaluation = read_evaluation(str(directory))  # `compass compare` reads this
    right, known = (sum(x[i] for x in evaluation.answers.values()) for i in (0, 1))
    assert right / known == result["evaluation"].avg_at_k and list(evaluation.sets) == ["heldout"]
    for row in rows:
        assert not [name for name in NAMES if row["metrics"].get(name) is None]
        assert any(name.startswith("espo/") for name in row["metrics"])
    groups = lines(directory, "rollouts")
    assert [g["step"] for g in groups] == [1] * 4 + [2] * 4 and all(
        len(g["samples"]) == 4 for g in groups
    )
    for number in (1, 2):
        samples = [s for g in groups if g["step"] == number for s in g["samples"]]
        m = rows[number - 1]["metrics"]
        assert (
            m["reward/mean"] == pytest.approx(np.mean([s["reward"] for s in samples]))
            and 0.1 < m["reward/mean"] < 0.9
        )
        assert [s["reward"] for s in samples] == [
            odd_verifiers.coin({}, s["response"]) for s in samples
        ]
        assert m["waste/tokens_generated"] == sum(s["tokens"] for s in samples)
        assert (
            m["truncated_frac"] == np.mean([s["truncated"] for s in samples])
            and m["response_length/max"] <= 16
        )
    assert (rows[0]["metrics"]["policy_version"], rows[1]["metrics"]["policy_version"]) == (1, 2)
    assert checkpoint.latest(directory) == 2 and result["steps"] == 2 and not result["stopped"]
    assert result["evaluation"].prompts == 4 and result["evaluation"].k == 2


def test_the_first_update_after_each_sync_is_on_policy(plain):
    """One update per rollout: the ratio to the recomputed log-probs is one; the rollout's log-probs
    are the trainer's.
    """
    for row in lines(plain[0]):
        m = row["metrics"]
        assert m["policy/ratio_dev_max"] == 0 and m["policy/clip_frac"] == 0
        assert (
            m["mismatch/logp_abs_diff"] < 1e-5
            and m["mismatch/extreme_frac"] == 0
            and m["mismatch/ess"] > 1 - 1e-6
        )
        assert m["replay/flip_frac"] == 0 and m["replay/unset_frac"] == 0
        assert m["grad_norm"] > 0
        print("loop:", m["policy/ratio_dev_max"], m["mismatch/logp_abs_diff"])


def test_the_same_run_again_gives_the_same_numbers_and_an_extension_goes_on(plain, tmp_path):
    run_rl(configured(tmp_path, steps=1))
    assert numbers(tmp_path) == numbers(plain[0])[:1]
    result = run_rl(configured(tmp_path, steps=2))
    assert result["steps"] == 2 and numbers(tmp_path) == numbers(plain[0])
    # an export has a row for each token of the tokenizer
    for directory in (plain[0], tmp_path):
        known = Tokenizer.load(directory / "tokenizer").vocab_size
        assert checkpoint.read_meta(directory)["vocab_rows"] == known < tiny_run().model.vocab_size


@pytest.mark.slow
def test_a_run_through_few_pages_is_the_same_run(plain, tmp_path):
    """Eight slots have 21 pages and would need 56. Samples are preempted and continue, and the
    training gets the same tokens, log-probs and routes.
    """
    config = configured(tmp_path)
    run_rl(evolve(config, rollout={"cache_pages": 21, "page_tokens": 8}))
    assert all(row["metrics"]["rollout/preempted"] > 0 for row in lines(tmp_path))
    for actual, expected in zip(numbers(tmp_path), numbers(plain[0]), strict=True):
        for name in expected:
            np.testing.assert_allclose(
                actual[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name
            )


def test_samples_without_a_verdict_are_left_out_and_counted(tmp_path):
    config = configured(tmp_path, "treacherous", steps=1, prompts_per_step=4)
    run_rl(evolve(config, rewards={"timeout_s": 0.5}, data={"eval_prompts": 0}))
    samples = [s for group in lines(tmp_path, "rollouts") for s in group["samples"]]
    outcomes = Counter(s["outcome"] for s in samples)
    assert (
        outcomes["timeout"]
        and outcomes["crash"]
        and outcomes["error"]
        and outcomes["ok"]
        and sum(outcomes.values()) == 16
    )
    for s in samples:
        assert s["outcome"] == {5: "timeout", 6: "crash", 7: "error"}.get(
            odd_verifiers._draw(s["response"]), "ok"
        )
    m = lines(tmp_path)[0]["metrics"]
    known = [s for s in samples if s["outcome"] == "ok"]
    assert (
        m["reward/unknown_frac"] == 1 - len(known) / 16
        and m["reward/timeout_frac"] == outcomes["timeout"] / 16
    )
    assert m["reward/mean"] == pytest.approx(np.mean([s["reward"] for s in known]))
    unknown_tokens = sum(s["tokens"] for s in samples) - sum(s["tokens"] for s in known)
    assert (
        m["waste/frac_none"] >= unknown_tokens / m["waste/tokens_generated"] - 1e-6 > 0
        and m["grad_norm"] > 0
    )


def test_permuted_rewards_keep_their_group_and_lose_their_sample(plain, tmp_path):
    config = configured(tmp_path, steps=1, permute_rewards=True)
    run_rl(evolve(config, data={"eval_prompts": 0}))
    permuted, plain = numbers(tmp_path)[0], numbers(plain[0])[0]
    unchanged = (
        "reward/mean",
        "zero_variance/rate_all_right",
        "zero_variance/rate_all_wrong",
        "waste/tokens_generated",
        "entropy_nats",
    )
    assert {name: permuted[name] for name in unchanged} == {name: plain[name] for name in unchanged}
    assert permuted["grad_norm"] != plain["grad_norm"]

    class Arrays:
        reward, known, group = np.arange(12.0), np.arange(12) % 3 > 0, np.repeat(np.arange(3), 4)

    metrics.permute_rewards(Arrays, (0, 1))
    np.testing.assert_array_equal(
        np.sort(Arrays.reward.reshape(3, 4)), np.arange(12.0).reshape(3, 4)
    )
    # a verdict stays with its reward
    np.testing.assert_array_equal(Arrays.known, Arrays.reward % 3 > 0)
    assert np.any(Arrays.reward != np.arange(12))


@pytest.mark.parametrize(
    "replay", ["R3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("R2", "off"))]
)
def test_other_replays_and_a_reference(tmp_path, replay):
    """The routes of the rollout or of scoring are replayed over two updates, or routing is live; a
    reference model is stored and scored.
    """
    config = configured(
        tmp_path,
        replay=replay,
        updates_per_rollout=2,
        objective=Grpo(kl_coef=0.1),
    )
    run_rl(evolve(config, data={"eval_prompts": 0}))
    first, second = numbers(tmp_path)
    assert first["mismatch/logp_abs_diff"] < 1e-5 and first["replay/unset_frac"] == 0
    # the second update's weights would route otherwise
    assert (first["replay/flip_frac"] > 0) == (replay != "off")
    assert first["policy/ratio_dev_max"] > 1e-4  # of the second update
    # test_step checks that it is zero at the start
    assert min(first["policy/ref_kl_k3"], second["policy/ref_kl_k3"]) > 1e-3
    assert first["policy_version"] == 2 and second["policy_version"] == 4


def test_gradients_that_are_not_finite_are_skipped_and_stop_the_run_in_the_end(
    tmp_path, monkeypatch
):
    real, bad = step.pull, set()

    def pull(*args):
        calls["n"] += 1
        return jax.tree.map(lambda g: g * jnp.nan if calls["n"] in bad else g, real(*args))

    calls = Counter()
    monkeypatch.setattr(step, "pull", pull)
    bad |= {1}  # one micro-batch of the first update
    config = configured(tmp_path / "once", steps=2)
    config = evolve(config, data={"eval_prompts": 0})
    run_rl(config)
    rows = numbers(tmp_path / "once")
    assert [m["skipped_updates"] for m in rows] == [1, 1] and [
        m["policy_version"] for m in rows
    ] == [0, 1]
    assert rows[0]["grad_norm"] is None and rows[1]["grad_norm"] > 0
    bad |= set(range(100))
    config = evolve(config, run_dir=str(tmp_path / "often"), rl={"steps": 9})
    with pytest.raises(
        TrainingDiverged, match=r"3 updates in a row had a non-finite gradient.*often"
    ):
        run_rl(config)
    assert len(numbers(tmp_path / "often")) == 2 and checkpoint.latest(tmp_path / "often") == 2


def test_a_run_directory_serves_one_process_one_model_and_one_configuration(plain, tmp_path):
    directory, config = plain[0], configured(plain[0])
    with RunDir(config), pytest.raises(RunDirectoryInUse, match="is in use by process"):
        run_rl(config)
    with pytest.raises(ConfigMismatch, match=r"rl.optim.learning_rate: 0.01 in the run, 0.02 now"):
        run_rl(
            configured(directory, optim=dataclasses.replace(config.rl.optim, learning_rate=0.02))
        )
    other = dataclasses.replace(config.model, hidden=16, layers=1)
    params = init_params(other, config.compute, jax.random.key(0))
    checkpoint.save(tmp_path, 1, {"state": {"params": params}}, {}, model=other)
    with pytest.raises(
        checkpoint.CheckpointMismatch,
        match=r"(?s)another model.*model.hidden: 16 in the checkpoint, 32 asked for",
    ):
        run_rl(configured(tmp_path))
