"""Dynamic sampling: rounds until enough groups vary, what is dropped is counted and remembered, a
stop in any round loses nothing.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from logged import lines, numbers
from stops import stop_at_sample
from tiny import make_prompt
from tiny_run import tiny_run

from compass_jax.config import ConfigError, RewardConfig, RLConfig, ZeroVarianceConfig
from compass_jax.records import Group, Rollout, Score
from compass_jax.train.gather import Interrupted, Sampled, Samples
from compass_jax.train.loop import run_rl
from compass_jax.train.refill import Progress, Refill, StepInterrupted
from compass_jax.weights import checkpoint

DYNAMIC = ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True, dynamic_batch=2, dynamic_rounds=3)
CONFIG = RLConfig(prompts_per_step=2, group_size=2, zero_variance=DYNAMIC)
UNKNOWN = Score(0.0, False, "timeout")


class Script:
    """Stands in for the gatherer: the rewards of each round's groups are given; routes hold 10 *
    prompt id + sample.
    """

    def __init__(self, *rounds, stop_in=None):
        self.rounds, self.stop_in, self.calls, self.drawn = list(rounds), stop_in, [], 0

    def draw(self, n):
        self.drawn += n
        return [dataclasses.replace(make_prompt(0, 3), id=self.drawn - n + i) for i in range(n)]

    def __call__(self, params, prompts, version, have, account):
        # groups that an interrupted step had kept
        if have.rollouts and len(have.rollouts) == 2 * len(prompts):
            return Sampled(
                [self._group(n, p, (0.0, 1.0)) for n, p in enumerate(prompts)], [], Samples({})
            )
        number = len(self.calls)
        self.calls.append([p.id for p in prompts])
        rewards = self.rounds[number]
        groups = [
            self._group(n, p, r) for n, (p, r) in enumerate(zip(prompts, rewards, strict=True))
        ]
        rows = np.array([[10 * p.id + c] for p in prompts for c in range(2)], np.uint8)
        store = jnp.asarray(rows)[:, :, None, None]
        if number == self.stop_in:
            raise Interrupted(Samples({r.row: r for r in groups[0].rollouts}, store))
        account.add({"zero_variance/grow_tokens": 1.0})
        return Sampled(groups, [], Samples({}, store))

    def _group(self, n, prompt, rewards):
        ids, zeros = np.arange(5, dtype=np.int32), np.zeros(5)
        rollouts = [
            Rollout(
                prompt,
                c,
                ids[: 4 + c],
                zeros[: 4 + c],
                zeros[: 4 + c],
                False,
                ids[: 4 + c],
                2 * n + c,
            )
            for c in range(2)
        ]
        return Group(
            prompt,
            tuple(rollouts),
            tuple(r if isinstance(r, Score) else Score(r, True) for r in rewards),
        )


VARIED, RIGHT, WRONG = (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def gathered(script, progress=None, load=None):
    return Refill(script, CONFIG, RewardConfig())(
        None, script.draw, 0, progress or Progress(), load
    )


def test_rounds_go_on_until_enough_groups_vary():
    """2 of 4 prompts a round are wanted. Round 1 keeps one, round 2 has three that vary: one is
    kept, two come too late.
    """
    script = Script([RIGHT, VARIED, (1.0, UNKNOWN), WRONG], [WRONG, VARIED, VARIED, VARIED])
    found = gathered(script)
    assert [g.prompt.id for g in found.groups] == [1, 5] and script.calls == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [[r.row for r in g.rollouts] for g in found.groups] == [[0, 1], [2, 3]]
    # the routes moved with their samples
    np.testing.assert_array_equal(found.store.ravel(), [10, 11, 50, 51])
    counts = {
        name.split("dynamic_")[-1]: value
        for name, value in found.metrics.items()
        if "zero_variance" in name
    }
    assert counts == {
        "rounds": 2,
        "surplus_groups": 2,
        "dropped_groups": 6,
        "dropped_tokens": 6 * 3,
        "zero_variance/grow_tokens": 2,
    }
    assert found.dropped_tokens == 6 * 3  # responses of 1 and 2 tokens
    assert [(p.id, o.known, o.reward_sum, o.response_tokens, o.kind) for p, o in found.results] == [
        (0, 2, 2.0, 3, "easy"),
        (1, 2, 1.0, 3, ""),
        (2, 1, 1.0, 3, ""),
        (3, 2, 0.0, 3, "hard"),
        (4, 2, 0.0, 3, "hard"),
        (5, 2, 1.0, 3, ""),
        (6, 2, 1.0, 3, ""),
        (7, 2, 1.0, 3, ""),
    ]


def test_after_the_last_round_uniform_groups_fill_the_batch():
    script = Script([RIGHT] * 4, [WRONG, WRONG, VARIED, WRONG], [RIGHT, WRONG, RIGHT, WRONG])
    found = gathered(script)
    assert [g.prompt.id for g in found.groups] == [6, 8] and found.metrics[
        "zero_variance/dynamic_filled_groups"
    ] == 1
    assert (
        found.metrics["zero_variance/dynamic_rounds"] == 3
        and found.metrics["zero_variance/dynamic_dropped_groups"] == 10
    )
    np.testing.assert_array_equal(found.store.ravel(), [60, 61, 80, 81])


def test_a_stopped_round_goes_on_where_it_was():
    """The first round's kept group, its routes and its account come back; the same prompts are
    drawn again.
    """
    rounds = [RIGHT, VARIED, RIGHT, WRONG], [WRONG, VARIED, VARIED, VARIED]
    whole = gathered(Script(*rounds))
    with pytest.raises(StepInterrupted) as stopped:
        gathered(Script(*rounds, stop_in=1))
    left = stopped.value.left
    assert (
        left.progress.rounds == 1
        and left.progress.kept == [[0, 1]]
        and sorted(left.front.rollouts) == [0, 1]
        and len(left.current.rollouts) == 2
    )
    again = Script(rounds[1])
    seen = []

    def load(kept, prompts):
        seen.extend(p.id for p in kept)
        seen.extend(p.id for p in prompts)
        return left._replace(progress=progress)

    progress = Progress(**json.loads(json.dumps(dataclasses.asdict(left.progress))))
    found = gathered(again, progress, load)
    assert seen == [1, 4, 5, 6, 7] and again.drawn == 8
    assert (
        found.metrics.keys() == whole.metrics.keys()
        and found.dropped_tokens == whole.dropped_tokens
    )
    assert [(p.id, o) for p, o in found.results] == [(p.id, o) for p, o in whole.results]
    for mine, theirs in zip(found.groups, whole.groups, strict=True):
        assert mine.prompt.id == theirs.prompt.id and [r.row for r in mine.rollouts] == [
            r.row for r in theirs.rollouts
        ]
    np.testing.assert_array_equal(found.store, whole.store)
    same = [name for name in whole.metrics if name.startswith("zero_variance")]
    assert {n: found.metrics[n] for n in same} == {n: whole.metrics[n] for n in same}


def test_dynamic_sampling_and_rl_zvp_exclude_each_other():
    with pytest.raises(
        ConfigError, match=r"dynamic_sampling drops the uniform groups that rl_zvp learns from"
    ):
        ZeroVarianceConfig(dynamic_sampling=True).validate()
    with pytest.raises(ConfigError, match=r"dynamic_rounds = 0: must be positive"):
        dataclasses.replace(DYNAMIC, dynamic_rounds=0).validate()


# ---- real runs -----------------------------------------------------------------------------------


def configured(directory):
    config = tiny_run("odd_verifiers:seldom")
    zero = dataclasses.replace(DYNAMIC, dynamic_batch=2, dynamic_rounds=4)
    rl = dataclasses.replace(config.rl, group_size=2, prompts_per_step=4, zero_variance=zero)
    return dataclasses.replace(
        config, run_dir=str(directory), rl=rl, data=dataclasses.replace(config.data, eval_prompts=0)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, compile_lightly):
    directory = tmp_path_factory.mktemp("dynamic")
    run_rl(configured(directory))
    return directory


@pytest.mark.usefixtures("compile_lightly")
def test_a_run_trains_on_groups_that_vary_and_counts_every_token(undisturbed):
    rounds = []
    for row in lines(undisturbed, "metrics"):
        m, groups = (
            row["metrics"],
            [g for g in lines(undisturbed, "rollouts") if g["step"] == row["step"]],
        )
        filled = m.get("zero_variance/dynamic_filled_groups", 0)
        assert sum(np.ptp([s["reward"] for s in g["samples"]]) > 0 for g in groups) == 4 - filled
        trained = sum(s["tokens"] for g in groups for s in g["samples"])
        dropped = m["zero_variance/dynamic_dropped_tokens"]
        assert m["waste/tokens_generated"] == trained + dropped and dropped > 0
        uniform = sum(
            s["tokens"]
            for g in groups
            for s in g["samples"]
            if np.ptp([x["reward"] for x in g["samples"]]) == 0
        )
        assert m["waste/frac_none"] == pytest.approx(
            (dropped + uniform) / (trained + dropped), rel=1e-6
        )
        assert (
            m["zero_variance/dynamic_dropped_groups"] == 8 * m["zero_variance/dynamic_rounds"] - 4
        )
        assert m["policy/ratio_dev_max"] == 0  # the routes that moved are those of the samples
        assert m["replay/unset_frac"] == 0 and m["mismatch/logp_abs_diff"] < 1e-5
        rounds.append(m["zero_variance/dynamic_rounds"])
    assert max(rounds) > 1  # or the test would not show what it says


@pytest.mark.usefixtures("compile_lightly")
@pytest.mark.parametrize("sample", [3, 36])
def test_sigterm_in_a_round_loses_nothing(undisturbed, tmp_path, monkeypatch, sample):
    """At the given sample of the run: in the first round (16 samples, which fill the first step),
    and in the second step's second one, when groups were kept and dropped."""
    stop_at_sample(monkeypatch, sample)
    assert run_rl(configured(tmp_path))["stopped"]
    pending = checkpoint.read_meta(tmp_path)["pending"]["progress"]
    assert (
        pending["rounds"] == (sample > 16)
        and len(pending["dropped"]) + len(pending["kept"]) == 8 * pending["rounds"]
    )
    assert not run_rl(configured(tmp_path))["stopped"]
    assert lines(tmp_path, "rollouts") == lines(undisturbed, "rollouts")
    for mine, theirs in zip(numbers(tmp_path), numbers(undisturbed), strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_places_of_the_front_store_that_no_group_has_taken_are_unset():
    """Zeros would be routes to expert 0: one group of two is kept when a stop comes in the second
    round.
    """
    script = Script([VARIED, WRONG, RIGHT, WRONG], [VARIED, WRONG, RIGHT, WRONG], stop_in=1)
    with pytest.raises(StepInterrupted) as stopped:
        Refill(script, CONFIG, RewardConfig())(None, script.draw, 0, Progress(), None)
    np.testing.assert_array_equal(
        np.asarray(stopped.value.left.front.store).reshape(-1), [0, 1, 255, 255]
    )
