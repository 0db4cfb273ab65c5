"""Notices that a run prints once: by hand, and in a real run of a dense model in which one group
gets no verdict and rewards are closer than declared.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from tiny_run import tiny_run

from compass_jax.base.records import Group, Prompt, Score
from compass_jax.commands.configured import load_config
from compass_jax.config import Objective, RLConfig, ShapingConfig, ZeroVarianceConfig, seam_class
from compass_jax.rl.advantages.maxrl import MaxRL
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.prepare import RewardScale, UpdateRows
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training import rl, step
from compass_jax.training.hooks.notices import Notices, floor_share, gap_violation
from compass_jax.training.idle_settings import idle_settings
from compass_jax.training.rl import run_rl


def idle_settings_of(config, *args, **options):
    """Calls `idle_settings` with what it reads of a run's settings."""
    return idle_settings(config.rl, config.policy, config.scored, *args, **options)


def notices_of(config, *args, **options):
    """Calls `Notices` with what it reads of a run's settings."""
    return Notices(config.rl, config.policy, config.scored, *args, **options)


ROOT = Path(__file__).parents[2]
DENSE = dict(family="qwen3", moe=None)
SHAPED = ShapingConfig(length_penalty=0.05)


def config_with(model=None, rewards=None, **rl):
    base = tiny_run()
    rl = {"updates_per_rollout": 2, **rl}
    parts = {"model": model or {}, "rl": rl, "rewards": rewards or {}}
    return dataclasses.replace(
        base,
        **{
            name: dataclasses.replace(getattr(base, name), **change)
            for name, change in parts.items()
        },
    )


def idle_clip(config):
    """Returns the notices about the clip."""
    return [
        text
        for text in idle_settings(config.rl, config.policy, config.scored, 10**6, 3)
        if "cannot act" in text
    ]


def group_of(*rewards):
    """Returns a group with these rewards; None means no verdict."""
    scores = tuple(
        Score(r or 0.0, r is not None, "ok" if r is not None else "timeout") for r in rewards
    )
    return Group(Prompt(1, 0, "x", "how much?", np.zeros(1, np.int32), ""), (), scores)


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_replay_on_a_dense_model_is_allowed_and_said(replay):
    (notice,) = idle_settings_of(config_with(DENSE, replay=replay), 100, 3)
    assert f"rl.replay = '{replay}': the model has no MoE layers" in notice
    assert (
        idle_settings_of(config_with(DENSE, replay="off"), 100, 3)
        == []
        == idle_settings_of(config_with(replay=replay), 100, 3)
    )


def test_a_clip_that_cannot_act_is_said():
    """One update of a rollout is on policy: its ratio is 1. A second one, or epoch, is not."""
    (notice,) = idle_settings_of(config_with(updates_per_rollout=1), 100, 3)
    assert "the clip of espo cannot act" in notice
    assert idle_settings_of(config_with(updates_per_rollout=1, epochs=2), 100, 3) == []
    assert idle_settings_of(config_with(updates_per_rollout=2), 100, 3) == []
    plain = {"updates_per_rollout": 1, "objective": Grpo()}
    assert idle_settings_of(config_with(**plain), 100, 3) == []
    (notice,) = idle_settings_of(
        config_with(**{**plain, "objective": Grpo(clip_high=0.28)}), 100, 3
    )
    assert "the clip of grpo cannot act" in notice


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*x*x*.py")), ids=lambda x: x.stem)
def test_a_configuration_for_pods_has_updates_in_which_its_clip_acts(file):
    assert idle_clip(load_config(str(file))) == []


def test_auto_that_finds_nothing_is_said(monkeypatch):
    auto = config_with()
    auto = evolve(auto, rollout={"quantize": "auto"})
    assert [
        "rollout.quantize = 'auto': no 8-bit type" in text
        for text in idle_settings(auto.rl, auto.policy, auto.scored, 100, 3)
    ] == [True]
    monkeypatch.setattr("compass_jax.training.idle_settings.kind_for", lambda chip: "int8")
    assert idle_settings(auto.rl, auto.policy, auto.scored, 100, 3) == []


def test_slots_that_devices_cannot_share_are_said():
    for slots, says in ((8, False), (6, True)):
        config = evolve(
            config_with(),
            mesh={"fsdp": 2, "expert": 2, "tensor": 2},
            rollout={"slots": slots},
        )
        texts = [
            text
            for text in idle_settings(config.rl, config.policy, config.scored, 10**6, 3)
            if "multiple of 4" in text
        ]
        assert len(texts) == says


def test_buckets_that_would_pad_less_are_named_once():
    """Rows have 9 and 64 tokens, in buckets of 32 and 64. After four steps the notice names 16 and
    64; there is no notice if the gain would be small.
    """
    messages = []
    config = config_with(buckets=(32, 64), micro_batch_tokens=128)
    notices = Notices(config.rl, config.policy, config.scored, messages.append)
    for _ in range(6):
        notices.of_lengths(np.array([9] * 16 + [0] * 8 + [64] * 4))
    (text,) = messages
    # 400 tokens in 16 rows of 32 and 4 of 64
    assert text.startswith("48% of the training tokens were padding in 4 steps")
    assert text.endswith("rl.buckets (16, 64) would have made it 22%")
    silent = notices_of(
        evolve(config, rl={"buckets": (16, 64)}),
        lambda text: pytest.fail(text),
    )
    for _ in range(6):
        silent.of_lengths(np.array([9] * 16 + [64] * 4))


def test_padding_is_that_of_the_updates_on_all_devices():
    """A step of 8 rows has two updates of 4. On 4 devices each is one micro-batch of 4 rows of 64
    tokens, in which the short rows are padded, or the short rows have their own of 4 rows.
    """
    messages = []
    config = config_with(buckets=(32, 64), micro_batch_tokens=256)
    notices = Notices(config.rl, config.policy, config.scored, messages.append)
    for _ in range(4):
        notices.of_lengths(np.array([9, 9, 9, 9, 64, 64, 64, 64]), rows_multiple=4)
    (text,) = messages
    # the first update has 4 rows of 32, the second 4 of 64
    assert text.startswith("24% of the training tokens were padding in 4 steps")
    assert text.endswith("rl.buckets (16, 64) would have made it 9%")
    silent = Notices(config.rl, config.policy, config.scored, lambda text: pytest.fail(text))
    for _ in range(4):  # 4 rows of 64 in each update, whatever the buckets
        silent.of_lengths(np.array([9, 64, 64, 64] * 2), rows_multiple=4)


def test_a_curriculum_over_prompts_of_one_label_is_said():
    config = config_with(zero_variance=ZeroVarianceConfig(curriculum=True))
    (notice,) = idle_settings(config.rl, config.policy, config.scored, 40, 1)
    assert (
        "all prompts have the same label" in notice
        and idle_settings(config.rl, config.policy, config.scored, 40, 2) == []
    )


@pytest.mark.parametrize(
    ("rewards", "gap", "expected"),
    [
        ([1, 0, 1], 1.0, None),
        ([0.5, 0, 1], 1.0, (0.0, 0.5)),
        ([0.5, 0, 1], 0.5, None),
        ([0.3, 0.1 + 0.2, 1], 0.7, None),
        ([], 1.0, None),
        ([0.9, 1.0, 0.0], 0.1, None),
        ([1, 0.98, 0], 0.1, (0.98, 1.0)),
        ([2, 2 + 5e-7], 1.0, None),
    ],
)
def test_a_gap_is_violated_by_rewards_that_differ_by_less(rewards, gap, expected):
    assert gap_violation(rewards, gap) == expected


def test_counts_of_a_step_and_each_thing_said_once():
    messages = []
    notices = notices_of(
        config_with(rewards={"smallest_gap": 0.5}, shaping=SHAPED), messages.append
    )
    groups = [
        group_of(1, 0, 0.25),
        group_of(None, None),
        group_of(0, None, 0.5),
        group_of(0.1, 0.2),
    ]
    for _ in range(2):
        assert notices.of_groups(groups) == {
            "reward/unverified_groups": 1,
            "reward/gap_violations": 2,
            "reward/extracted_frac": 1,
            "groups/varied_frac": 0.75,
            "groups/undecided_frac": 0.25,
            **{f"groups/{kind}_frac": 0 for kind in ("all_right", "all_wrong", "between")},
        }
    assert (
        len(messages) == 1
        and "smallest_gap = 0.5" in messages[0]
        and "got 0 and 0.25 ('how much?')" in messages[0]
    )
    for _ in range(2):
        metrics = notices.of_groups([group_of(None, None)] * 3)
        assert (metrics["reward/unverified_groups"], metrics["reward/gap_violations"]) == (3, 0)
        assert metrics["groups/undecided_frac"] == 1 and math.isnan(
            metrics["reward/extracted_frac"]
        )
    assert (
        len(messages) == 2
        and "no verifier gave a reward in a whole step (6 timeout)" in messages[1]
    )
    undeclared = notices_of(config_with(shaping=ShapingConfig(length_penalty=0.2)), messages.append)
    metrics = undeclared.of_groups([*groups, group_of(0, 0.2, 1)])  # 0.1 counts, 0.2 does not
    assert metrics["reward/gap_violations"] == 1 and "got 0.1 and 0.2" in messages.pop()
    unshaped = notices_of(config_with(rewards={"smallest_gap": 0.5}), messages.append)
    # without penalties no order can be inverted
    metrics = unshaped.of_groups(groups)
    assert metrics["reward/unverified_groups"] == 1 and "reward/gap_violations" not in metrics
    assert len(messages) == 2


def test_a_reward_below_zero_is_told_once_if_the_advantage_needs_others():
    messages = []
    config = config_with()
    Notices(config.rl, config.policy, config.scored, messages.append).of_groups([group_of(1, -0.5)])
    assert messages == []
    rl = dataclasses.replace(config.rl, advantage=MaxRL())
    notices = notices_of(dataclasses.replace(config, rl=rl), messages.append)
    for _ in range(2):
        notices.of_groups([group_of(1, 0), group_of(None, None), group_of(1, -0.5)])
    (text,) = messages
    assert "'maxrl' needs rewards of at least 0, and an answer got -0.5 ('how much?')" in text


def test_partial_credit_that_no_penalty_can_turn_around_is_not_complained_about():
    messages = []
    notices = notices_of(load_config(str(ROOT / "configs/tiny_reasoning_cpu.py")), messages.append)
    metrics = notices.of_groups([group_of(0, 0.5, 1)])
    assert metrics["reward/gap_violations"] == 0 and messages == []


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "espo"])
def test_a_group_without_any_verdict_is_in_no_denominator(name):
    """The group's advantage and weight are 0, and its tokens count as tokens without a signal. The
    weights of the other group are those that it has alone.
    """
    rng, config = (
        np.random.default_rng(0),
        RLConfig(objective=seam_class(Objective, name)()),
    )
    mask = np.arange(9) >= rng.integers(1, 6, (6, 1))
    entropy, reward = (
        rng.random((6, 9)).astype(np.float32),
        np.array([1, 0, 1, 1, 0, 1], np.float32),
    )
    known = np.array([True] * 3 + [False] * 3)

    def run(group, n_groups):
        inputs = UpdateRows(mask, reward, known, jnp.asarray(group, jnp.int32), entropy)
        scale = RewardScale(1.0, 0.0, max_new_tokens=8)
        return step.prepare(inputs, n_groups=n_groups, config=config, scale=scale)

    two_groups, diagnostics = run([0, 0, 0, 1, 1, 1], 2)
    one_group, _ = run([0, 0, 0, -1, -1, -1], 1)
    for field in ("advantage", "weight", "mask"):
        np.testing.assert_array_equal(
            getattr(two_groups, field)[:3], getattr(one_group, field)[:3], err_msg=field
        )
        assert not np.any(getattr(two_groups, field)[3:]) and np.any(getattr(two_groups, field)[:3])
    shares = {k: float(v) for k, v in finalize_diagnostics(diagnostics).items()}
    assert shares["waste/frac_none"] == pytest.approx(mask[3:].sum() / mask.sum())
    assert shares["zero_variance/rate_all_right"] == shares["zero_variance/rate_all_wrong"] == 0


class Uneven:
    """A scorer that gives no verdict for the first prompt that it gets, and right, nearly right and
    wrong in turn for the others.
    """

    slow = False
    workers = SimpleNamespace(tried_rows=set())

    def __init__(self, *_):
        self.waiting, self.first, self.turn = [], None, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, key, prompt, text):
        self.first = prompt.id if self.first is None else self.first
        self.turn += 1
        known = prompt.id != self.first
        self.waiting.append(
            (
                key,
                Score(
                    (1.0, 0.97, 0.0)[self.turn % 3] if known else 0.0,
                    known,
                    "ok" if known else "crash",
                ),
            )
        )

    def collect(self, block):
        scores, self.waiting = self.waiting, []
        return scores


@pytest.mark.slow
def test_a_dense_run_with_replay_says_so_and_counts_what_got_no_verdict(tmp_path, monkeypatch):
    """R2 would store routes, which a dense model does not have, so it runs as with replay off."""
    messages = []
    monkeypatch.setattr(rl, "open_scorer", Uneven)
    monkeypatch.setattr(Telemetry, "note", lambda self, text: messages.append(text))
    config = config_with(DENSE, replay="R2", shaping=SHAPED, steps=2)
    run_rl(evolve(config, run_dir=str(tmp_path), data={"eval_prompts": 0}))
    first, second = (
        json.loads(line)["metrics"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert (first["reward/unverified_groups"], second["reward/unverified_groups"]) == (
        1,
        0,
    ) and first["reward/unknown_frac"] == 0.25
    assert (
        first["reward/gap_violations"] == 3
        and second["reward/gap_violations"] == 4
        and min(first["grad_norm"], second["grad_norm"]) > 0
    )
    assert "replay/flip_frac" not in first and math.isfinite(first["loss"])
    matches = (
        [text for text in messages if "rl.replay = 'R2'" in text],
        [text for text in messages if "the penalties of rl.shaping sum to 0.05" in text],
    )
    assert [len(x) for x in matches] == [1, 1]


ON_THE_FLOOR = {
    "espo/group_0/token_frac": 0.8,
    "espo/group_0/floor_frac": 0.9,
    "espo/group_1/token_frac": 0.2,
    "espo/group_1/floor_frac": 0.3,
}


def test_the_floor_of_espo_is_said_once_where_most_tokens_sit_on_it():
    assert math.isclose(floor_share(ON_THE_FLOOR), 0.8 * 0.9 + 0.2 * 0.3)
    assert floor_share({"loss": 1.0}) == 0.0
    messages = []
    notices = notices_of(config_with(), messages.append)
    notices.of_update({**ON_THE_FLOOR, "espo/group_0/floor_frac": 0.5})
    assert messages == []
    notices.of_update(ON_THE_FLOOR)
    notices.of_update(ON_THE_FLOOR)
    assert len(messages) == 1
    assert "about 78% of the tokens" in messages[0] and "not the paper's" in messages[0]
    assert "rl.objective.floor = 1e-05" in messages[0]


def test_the_floor_is_not_said_where_the_clip_cannot_act():
    messages = []
    notices_of(config_with(updates_per_rollout=1), messages.append).of_update(ON_THE_FLOOR)
    assert messages == []
