"""The guard of a run: its metrics, notices and actions, and its state in a resumed run."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from tiny_run import tiny_run

from compass_jax.base.records import Group, Prompt, Score
from compass_jax.config import ConfigError, GuardConfig, RewardConfig, RLConfig
from compass_jax.training.hooks.guard import Audit, Guard, RewardExploited, audit
from compass_jax.training.hooks.notices import Notices
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint

PROMPT = Prompt(1, 0, "x", "how much?", np.zeros(1, np.int32), "")


def group(*pairs):
    """Returns a group with these (reward, gold label); None means unknown or unlabelled."""
    scores = tuple(
        Score(reward or 0.0, reward is not None, components={} if gold is None else {"gold": gold})
        for reward, gold in pairs
    )
    return Group(PROMPT, (), scores)


def test_an_audit_is_of_answers_with_both_numbers_and_of_groups_alike():
    several = group((1.0, 0.0), (0.0, 1.0), (1.0, None), (None, 1.0), (1.0, 0.5))
    assert audit([several, group((0.0, 1.0))]) == Audit(1 / 3, 0.75)
    assert audit([several, group((1.0, None))]) == audit([several])
    assert all(map(math.isnan, audit([group((1.0, None))]))) and math.isnan(audit([]).gold)


def steps_of(guard, first, last, seed=0):
    """Feeds the guard steps of a run whose reward rises while gold falls from step 10 on; every
    fifth step has no label. Returns the guard's metrics of each step.
    """
    results = []
    for step in range(first, last):
        draw = np.random.default_rng((seed, step))
        reward, noise, loss = 0.02 * step, *draw.standard_normal(2)
        gold = None if step % 5 == 0 else 0.6 - 0.03 * max(step - 10, 0) + 0.002 * noise
        metrics = {"reward/mean": reward + 0.01 * noise, "loss": loss}
        groups = [group((reward + 0.01 * noise, gold), (reward, gold))]
        results.append(guard.of_step(step, groups, metrics))
    return results


def new_guard(messages, **settings):
    config = evolve(tiny_run(), rl={"guard": GuardConfig(window=6, **settings), "steps": 30})
    notices = Notices(config.rl, config.policy, config.scored, messages.append)
    return Guard(config.rl.guard, 30, config.rewards, notices.print_of_kind)


def test_it_says_once_when_they_part_and_after_which_step():
    messages = []
    guard = new_guard(messages)
    results = steps_of(guard, 1, 30)
    parted = next(
        i for i, one in enumerate(results, 1) if one.get("guard/parting_p", 1) <= 0.05 / 25
    )
    assert guard.parted == parted and 12 <= parted <= 20
    # of the seven steps from parted - 6 on, one has no label: the six audits are of the others
    assert guard.last_sound == parted - 7
    (line,) = [text for text in messages if text.startswith("reward up, gold down: ")]
    assert "over the last 6 audited steps" in line and "docs/howto/failures.md" in line
    # six labelled steps come by step 7, and every step has a reward and a loss
    assert [one.keys() for one in results[4:7]] == [
        set(),
        {"guard/loss_spike", "guard/reward_rise_bound"},
        {"guard/loss_spike", "guard/reward_rise_bound"}
        | {"guard/parting_p", "guard/reward_slope", "guard/gold_slope"},
    ]


@pytest.mark.parametrize("cut", [1, 4, 12, 16, 25])
def test_a_guard_that_is_restored_goes_on_as_one_left_alone(cut):
    full, interrupted, resumed = (new_guard([]) for _ in range(3))
    expected = steps_of(full, 1, 30)
    results = steps_of(interrupted, 1, cut)
    resumed.restore(json.loads(json.dumps(interrupted.state())), cut - 1)
    assert results + steps_of(resumed, cut, 30) == expected
    assert resumed.state() == full.state() and full.parted


def test_a_restored_guard_of_a_smaller_window_keeps_the_latest_steps():
    guard = new_guard([])
    steps_of(guard, 1, 9)
    smaller = Guard(GuardConfig(window=4), 30, RewardConfig(), lambda kind, text: None)
    smaller.restore(guard.state(), 8)
    assert smaller.state() == {
        name: value[-4:] if isinstance(value, list) else value
        for name, value in guard.state().items()
    }
    assert smaller.before_window(8) == 3  # its audits: steps 4, 6, 7 and 8; 5 has no label
    smaller.restore({}, 0)
    assert not smaller.state()["means"]


def test_a_state_of_an_older_commit_has_its_audits_in_consecutive_steps():
    guard = new_guard([], action="stop")
    steps_of(guard, 1, 25)
    old = guard.state()
    del old["audited_steps"], old["last_sound"]
    restored = new_guard([], action="stop")
    restored.restore(old, 24)
    assert restored.before_window(24) == 24 - 6
    assert restored.last_sound == guard.parted - 6 > 0


def test_where_the_action_becomes_restore_the_next_test_decides():
    original, restoring = new_guard([]), new_guard([], action="restore")
    steps_of(original, 1, 25)
    restoring.restore(original.state(), 24)
    assert original.parted and not restoring.parted
    steps_of(restoring, 26, 27)
    assert restoring.parted == 26
    finished = new_guard([], action="restore")
    finished.restore(original.state() | {"ended": True}, 24)
    assert finished.ended and finished.parted == original.parted


@pytest.mark.parametrize(
    "means, losses, begins",
    [
        (np.linspace(0.1, 0.9, 8), [1, 2, 3, 4, 5, 4, 3, 2], ""),
        (np.linspace(0.1, 0.9, 8), [1, 2, 3, 4, 5, 4, 3, 90], "loss spike: the loss of this step"),
        (np.full(8, 0.3), [1, 2, 3, 4, 5, 4, 3, 2], "stagnant reward: over the last 8 steps"),
        (np.full(8, 0.99), [1, 2, 3, 4, 5, 4, 3, 2], ""),  # it cannot rise further
        ([0.3, 0.6, 0.1, 0.5, 0.2, 0.4, 0.5, 0.3], [1, 2, 3, 4, 5, 4, 3, 2], ""),  # noise
    ],
)
def test_a_spike_and_a_stagnant_reward_are_said(means, losses, begins):
    messages = []
    guard = Guard(
        GuardConfig(window=8), 50, RewardConfig(), lambda kind, text: messages.append(text)
    )
    for step, (mean, loss) in enumerate(zip(means, losses, strict=True), 1):
        metrics = guard.of_step(step, [], {"reward/mean": mean, "loss": float(loss)})
    assert metrics.keys() == {"guard/loss_spike", "guard/reward_rise_bound"}
    assert [text[: len(begins)] for text in messages] == ([begins] if begins else [])


def test_a_reward_that_posterior_selection_holds_is_no_stagnant_one():
    notices = []
    for steady in (False, True):
        guard = Guard(
            GuardConfig(window=8), 50, RewardConfig(), lambda *x: notices.append(x), steady
        )
        for step in range(1, 9):
            metrics = guard.of_step(step, [], {"reward/mean": 0.3, "loss": 1.0})
    assert [kind for kind, _ in notices] == ["stagnant reward"]
    assert metrics["guard/reward_rise_bound"] == pytest.approx(0, abs=1e-9)


def test_what_the_guard_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"rl.guard.action = 'restore' with rl.save_every = 0"):
        RLConfig(guard=GuardConfig(action="restore"), save_every=0).validate()
    with pytest.raises(ConfigError, match=r"rl.guard.window = 3: must be at least 4"):
        GuardConfig(window=3).validate()
    guard = new_guard([], action="stop")
    guard.refuse_parted("runs/x")  # they have not parted yet
    steps_of(guard, 1, 30)
    with pytest.raises(RewardExploited, match="saved in runs/x; the last step before"):
        guard.refuse_parted("runs/x")


REWARDS = """
def short(prompt, response, **row):
    return 1.0 / (1 + len(response))
def long(prompt, response, **row):
    return 1 - 1.0 / (1 + len(response))
short.range = long.range = (0.0, 1.0)
short.gap = long.gap = 0.001
"""


def exploited_run(folder, action):
    """Returns a run with a reward for short answers and a gold label for long ones. They part soon,
    since a false alarm is allowed in every second run.
    """
    file = folder / "rewards.py"
    file.write_text(REWARDS)
    base = tiny_run(f"{file}:short")
    (source,) = base.data.sources
    guard = GuardConfig(window=4, false_alarms=0.5, action=action)
    return evolve(
        base,
        run_dir=str(folder / "run"),
        trackers=(),
        data={"sources": (evolve(source, gold=f"{file}:long"),), "eval_prompts": 2},
        rl={"steps": 20, "save_every": 1, "guard": guard},
    )


def weights_at(config, step):
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[0], leaf[1]),
        dict(checkpoint.read_manifest(config.run_dir, step).leaves),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    arrays = checkpoint.restore(
        checkpoint.find(config.run_dir, step),
        {"state": {"params": nested(abstract, "state/params/")}},
        subset=True,
    )[1]
    return jax.tree.leaves(arrays)


def nested(flat, prefix):
    """Returns the tree of the leaves whose paths begin with `prefix`."""
    tree = {}
    for path, leaf in flat.items():
        if path.startswith(prefix):
            *parents, name = path.removeprefix(prefix).split("/")
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = leaf
    return tree


@pytest.mark.slow
def test_a_run_goes_back_to_the_policy_from_before_they_parted(tmp_path, capsys):
    config = evolve(exploited_run(tmp_path, "restore"), rl={"eval_every": 1})
    result = run_rl(config)
    metrics = lines(tmp_path / "run")
    last_step = len(metrics)
    assert 4 < last_step < 20 and not result["stopped"] and result["evaluation"] is not None
    sound_step = last_step - 4
    assert (
        f"ends after step {last_step} with the policy of step {sound_step}"
        in capsys.readouterr().out
    )
    assert checkpoint.latest(config.run_dir) == last_step
    for was, now in zip(weights_at(config, sound_step), weights_at(config, last_step), strict=True):
        np.testing.assert_array_equal(was, now)
    meta = checkpoint.read_meta(config.run_dir)
    assert meta["hooks"]["guard"]["ended"] and meta["hooks"]["guard"]["parted"] == last_step
    run_rl(config)  # it has ended: no step is repeated
    assert lines(tmp_path / "run") == metrics
    before = numbers(tmp_path / "run"), weights_at(config, last_step)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{last_step:08d}")
    run_rl(config)  # as after a kill in the last step
    assert numbers(tmp_path / "run") == before[0]
    for was, now in zip(before[1], weights_at(config, last_step), strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.slow
def test_a_run_that_stops_goes_on_with_another_action(tmp_path):
    config = exploited_run(tmp_path, "stop")
    with pytest.raises(RewardExploited, match=r"stopped after step \d"):
        run_rl(config)
    last_step = len(lines(tmp_path / "run"))
    assert last_step < 20 and checkpoint.latest(config.run_dir) == last_step
    with pytest.raises(RewardExploited):
        run_rl(config)
    assert len(lines(tmp_path / "run")) == last_step
    run_rl(evolve(config, rl={"guard": GuardConfig(window=4, false_alarms=0.5)}))
    assert len(lines(tmp_path / "run")) == 20
