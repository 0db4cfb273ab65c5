"""The samples in flight, without a model: a stop at any sample leads to the same decisions, all
checkpoints have the same structure, and no finished sample is sampled again.
"""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from replaying import GroupReplay
from tiny import EOS, make_prompt

from compass_jax.base.records import Rollout, Score
from compass_jax.config import (
    RewardConfig,
    RLConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.experience import collect, saved_samples
from compass_jax.experience.admission import OpenCollector
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.collect import results_of
from compass_jax.experience.step_policies.plain import Plain
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.experience.turns import Turns
from compass_jax.model.routes import take_routes
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.training.hooks.base import StepRecord
from compass_jax.weights.state import joined, shapes, split

LENGTH, SLOTS, STEPS = 12, 5, 3
DYNAMIC = {"rl_zvp": False, "dynamic_sampling": True, "dynamic_batch": 2, "dynamic_rounds": 3}


def rl_config(**settings):
    """Returns a configuration without stages and step policy, but for those of `settings`."""
    return RLConfig(**{"step_policy": None, "zero_variance": ZeroVarianceConfig(), **settings})


def replaying(max_route_age=0, stages=None, **settings):
    """Returns a configuration that replays groups; `stages` changes the settings against zero
    variance, and `settings` the others of RL.
    """
    return rl_config(
        prompts_per_step=3,
        hooks=(GroupReplay(groups=4, max_age=2, max_route_age=max_route_age),),
        zero_variance=ZeroVarianceConfig(**{"rl_zvp": False, **(stages or {})}),
        correction=named_correction("tis"),
        **{"group_size": 2, **settings},
    )


CONFIGS = {
    "plain": rl_config(prompts_per_step=3, group_size=2),
    "growth": rl_config(
        prompts_per_step=3,
        group_size=2,
        zero_variance=ZeroVarianceConfig(grow_to=7),
    ),
    "dynamic": rl_config(
        prompts_per_step=3, group_size=2, zero_variance=ZeroVarianceConfig(**DYNAMIC)
    ),
    "dynamic growth": rl_config(
        prompts_per_step=3, group_size=2, zero_variance=ZeroVarianceConfig(**DYNAMIC, grow_to=4)
    ),
    "plain rounds": rl_config(prompts_per_step=3, group_size=2, step_policy=Plain(rounds=3)),
    "plain rounds, growth": rl_config(
        prompts_per_step=3,
        group_size=2,
        step_policy=Plain(rounds=3),
        zero_variance=ZeroVarianceConfig(grow_to=4),
    ),
    "screening rounds": rl_config(
        prompts_per_step=3, group_size=4, step_policy=Screening(2, 1.0, 0.6, rounds=3)
    ),
    "replay": replaying(max_route_age=1),
    "replay, live": replaying(),
    "replay, growth": replaying(stages={"grow_to": 4}),
    "replay, dynamic": replaying(1, stages=DYNAMIC | {"dynamic_batch": 1, "dynamic_rounds": 1}),
    "replay, screening": replaying(1, group_size=4, step_policy=Screening(n0=2, min_chance=1.0)),
    "partial replay": replaying(1, partial_prompts=2),
    "partial": rl_config(
        prompts_per_step=3, group_size=2, partial_prompts=2, correction=named_correction("tis")
    ),
    "partial growth": rl_config(
        prompts_per_step=3,
        group_size=2,
        partial_prompts=2,
        zero_variance=ZeroVarianceConfig(grow_to=6),
        correction=named_correction("tis"),
    ),
}
IN_ROUNDS = [name for name in CONFIGS if "partial" not in name]


@cache
def drawn(key):
    """Returns the (response tokens, reward, route) of a sample's key."""
    rng = np.random.default_rng(key)
    return int(rng.integers(1, 8)), float(rng.random() < 0.35), int(rng.integers(0, 250))


# the functions with which a RouteBuffer makes and copies rows, here with one route per sample
ROUTES = (
    lambda rows: jnp.full((rows, 1, 1, 1), 255, jnp.uint8),
    lambda store, rows: take_routes(store, rows, 1),
)


class World:
    """A source of prompts, verdicts and samples without a model. `batches`: the samples of each
    batch; `finished`: the finished samples; `ticks`: those of all batches.
    """

    def __init__(self, name, stop_at=None, verdict_ticks=None, slots=SLOTS):
        self.config = replace(CONFIGS[name], verdict_ticks=verdict_ticks)
        self.stop_at, self.slots, self.ticks = stop_at, slots, 0
        self.place, self.batches, self.finished, self.verdicts = 0, [], [], []

    def new_buffer(self):
        rl = self.config
        routes = RouteBuffer(*ROUTES, rl.routed_groups, rl.capacity)
        return ExperienceBuffer(routes, rl.holds_routes)

    def find(self, prompt_id, visit):
        return make_prompt(prompt_id - 1000, 3, visit)

    def draw(self, n):
        self.place += n
        prompts = [make_prompt(i % 7, 3, i // 7) for i in range(self.place - n, self.place)]
        # as a selector predicts them at this visit; a restored run must not predict anew
        return [replace(x, predicted=(1.0, 1 + 1e-6 * (x.visit + x.id % 7))) for x in prompts]

    def stopped(self):
        return self.stop_at is not None and len(self.finished) >= self.stop_at

    # the methods of a verifier
    slow, workers_only = False, True

    def submit(self, key, prompt, response):
        self.verdicts.append((key, Score(drawn(key)[1], True)))

    def collect(self, block):
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    # the batcher of an engine
    def batch(self, engine, params, prompts, samples, *args, **options):
        return Batch(self, prompts, SimpleNamespace(**options))

    def collector(self):
        return OpenCollector(
            self,
            self,
            Turns(lambda tokens: "", lambda says, turn: list(says), LENGTH),
            lambda prompt: float("nan"),
            self.config,
            RewardConfig(),
            0,
            batcher=self.batch,
        )


class Slow(World):
    """A World whose verdicts come one by one, at every third call of `collect`; the stop comes at
    such a call.
    """

    slow, workers_only = True, False

    def __init__(self, name, stop_at=None):
        super().__init__(name, stop_at)
        self.calls = 0

    def submit(self, key, prompt, response):
        if key not in dict(self.verdicts):  # a new process would not have them
            super().submit(key, prompt, response)

    def collect(self, block):
        assert not block, "a stop could not end it"
        self.calls += 1
        return [self.verdicts.pop()] if self.verdicts and self.calls % 3 == 0 else []

    def stopped(self):
        return self.stop_at is not None and self.calls >= self.stop_at


class Batch:
    """A batch in which each sample gets one token a tick."""

    def __init__(self, world, prompts, options):
        self.world, self.options = world, options
        self.first = {p.key: row for p, row in zip(prompts, options.rows, strict=True)}
        carried_lengths = {r.key: len(r.response) for r in options.carried}
        prompts = {p.key: p for p in prompts}
        self.prompts, self.versions = prompts, {r.key: r.versions[3:] for r in options.carried}
        self.running, self.waiting = {}, []
        self.carried_lengths = carried_lengths
        self.add(options.sample_keys)
        world.batches.append(sorted(options.sample_keys))

    def add(self, keys):
        of_carried = self.carried_lengths
        self.waiting += sorted(keys, key=lambda k: (k not in of_carried, k[1], k[0], k.index))

    def __iter__(self):
        while self.waiting or self.running:
            if self.options.enough():
                return
            while self.waiting and len(self.running) < self.world.slots:
                key = self.waiting.pop(0)
                self.running[key] = self.carried_lengths.get(key, 0)
            done, self.world.ticks = [], self.world.ticks + 1
            for key in list(self.running):
                self.running[key] += 1
                if self.running[key] >= drawn(key)[0]:
                    done.append(self.rollout(key, self.running.pop(key)))
            for rollout in done:
                self.world.finished.append(rollout.key)
                yield rollout
            if hasattr(self.options, "admit"):
                self.add(self.options.admit(done))

    def rollout(self, key, n):
        prompt, old_versions = self.prompts[key[:2]], self.versions.get(key, np.zeros(0, np.int32))
        tokens = np.concatenate([prompt.tokens, np.full(n, 7, np.int32)])
        tokens[-1] = EOS if n == drawn(key)[0] else 7
        new_versions = np.full(n - len(old_versions), self.options.policy_version, np.int32)
        versions = np.concatenate([np.zeros(3, np.int32), old_versions, new_versions])
        row, rows = self.first[key[:2]] + key.index, self.options.buffer
        rows.rows = rows.rows.at[row].set(drawn(key)[2])
        zeros = np.zeros(3 + n, np.float32)
        return Rollout(
            prompt, key.index, tokens, zeros, zeros, bool(tokens[-1] != EOS), versions, row
        )

    def abort(self):
        unfinished = {
            **self.running,
            **{k: self.carried_lengths[k] for k in self.waiting if k in self.carried_lengths},
        }
        return [self.rollout(key, n) for key, n in unfinished.items() if n]


def saved(world, buffer):
    """Returns a copy of the buffer that was saved to a checkpoint and restored."""
    before, arrays = split(saved_samples.state(buffer))
    state, fresh = json.loads(json.dumps(before)), world.new_buffer()
    assert {k: (v.shape, v.dtype) for k, v in arrays.items()} == {
        k: (v.shape, v.dtype) for k, v in shapes(state).items()
    }
    saved_samples.restore(fresh, joined(state, arrays), world.find)
    fresh.policy_state = json.loads(json.dumps(buffer.policy_state))
    again, of_fresh = split(saved_samples.state(fresh))
    assert again == state
    for key, sample in fresh.samples.items():
        assert sample.rollout.prompt.predicted == buffer.samples[key].rollout.prompt.predicted
    for name, array in arrays.items():
        np.testing.assert_array_equal(of_fresh[name], array)
    return fresh


def state_of(buffer):
    """Returns the buffer's state without its arrays."""
    return split(saved_samples.state(buffer))[0]


def trained(config, buffer, step):
    """Returns the groups that a step trains on, checks their routes and ends the step."""
    size, room = config.capacity, config.held_groups
    record = StepRecord(step + 1, buffer.step_groups(), step, 0, buffer.held, room)
    for hook in config.hooks:
        hook.on_groups(record, {})
    live = [place for place, is_live in record.earlier.items() if is_live]
    flat = np.asarray(buffer.routes_of(record.trained, live)).ravel()
    for n, group in enumerate(record.trained):
        routes = [255 if n in live else drawn(r.key)[2] for r in group.rollouts]
        unset = [255] * (size - len(routes))
        np.testing.assert_array_equal(flat[n * size : (n + 1) * size], routes + unset)
    buffer.end_step(record.to_hold)
    return record


def run(world, restart=lambda step, stopped: False):
    """Returns every step's decisions. The buffer goes through a checkpoint after each stop, and
    after the steps for which `restart` returns true.
    """
    buffer, out = world.new_buffer(), []
    for step in range(STEPS):
        while True:
            last = step == STEPS - 1
            args = (buffer, None, step, world.draw, last, world.stopped)
            metrics = world.collector()(*args)
            stopped, buffer = metrics is None, saved(world, buffer)
            if not stopped:
                break
            world.stop_at = None
        counts = {k: v for k, v in metrics.items() if k.startswith(("zero", "rollout/carried"))}
        results = [(p.key, tuple(o)) for p, o in results_of(buffer, RewardConfig())]
        record = trained(world.config, buffer, step)
        samples = [r for group in record.trained for r in group.rollouts]
        versions = [r.versions.tolist() for r in samples]
        out.append(([r.key for r in samples], results, counts, versions))
        if restart(step, stopped):
            buffer = saved(world, buffer)
    return out


@pytest.fixture(scope="module")
def undisturbed():
    out = {}
    for name in CONFIGS:
        world = World(name)
        out[name] = run(world), world
    return out


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_a_stop_at_any_sample_leads_to_the_same_decisions(undisturbed, name):
    expected, baseline = undisturbed[name]
    for at in range(1, len(baseline.finished) + 1, 3):
        world = World(name, stop_at=at)
        assert run(world) == expected, at
        # no finished sample was run again
        assert Counter(world.finished) == Counter(baseline.finished)


@pytest.mark.parametrize("ticks", [0, 3])
@pytest.mark.parametrize("name", IN_ROUNDS)
def test_further_samples_in_the_same_rollout_are_those_of_rounds(undisturbed, name, ticks):
    """The same decisions on the same samples, without a stop and with one at any sample."""
    expected, in_rounds = undisturbed[name]
    world = World(name, verdict_ticks=ticks)
    assert run(world) == expected
    assert Counter(world.finished) == Counter(in_rounds.finished)
    for at in range(1, len(world.finished) + 1, 3):
        stopped = World(name, stop_at=at, verdict_ticks=ticks)
        assert run(stopped) == expected, at
        assert Counter(stopped.finished) == Counter(world.finished)


def test_further_samples_in_the_same_rollout_take_fewer_ticks():
    in_rounds, world = World("growth", slots=64), World("growth", slots=64, verdict_ticks=0)
    assert run(world) == run(in_rounds) and world.ticks < in_rounds.ticks


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_a_stop_does_not_wait_for_slow_verdicts_and_those_that_came_stand(
    undisturbed, name, monkeypatch
):
    monkeypatch.setattr(collect, "POLL_S", 0)
    expected, baseline = undisturbed[name]
    slow = Slow(name)
    assert run(slow) == expected
    for at in range(1, slow.calls, 11):
        world = Slow(name, stop_at=at)
        assert run(world) == expected, at
        assert Counter(world.finished) == Counter(baseline.finished)
        assert world.stop_at is None, "the stop was not seen"


@pytest.mark.parametrize("name", ["partial", "partial growth"])
def test_a_stop_at_any_sample_of_partial_rollouts_loses_nothing(undisturbed, name):
    """The place of the cut depends on the stop; the prompts and their samples do not."""
    expected, baseline = undisturbed[name]
    for at in range(1, len(baseline.finished) + 1, 2):
        world = World(name, stop_at=at)
        steps = run(world)
        assert {k for step in steps for k in step[0]} == {k for step in expected for k in step[0]}
        assert Counter(world.finished) == Counter(baseline.finished)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "replay" in name])
def test_groups_of_earlier_steps_are_trained_on_again(undisturbed, name):
    steps, _ = undisturbed[name]
    of_step = [{key[:2] for key in step[0]} for step in steps]
    assert of_step[0] & (of_step[1] | of_step[2]) or of_step[1] & of_step[2]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_kill_between_steps_changes_nothing(undisturbed, name):
    expected, _ = undisturbed[name]
    assert run(World(name), restart=lambda step, stopped: True) == expected


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_whole_rollout_that_nobody_has_trained_on_comes_back_whole(name):
    """One step off saves such a rollout. After a restart no prompt is drawn, no sample is taken,
    and the metrics are the same.
    """
    world = World(name)
    buffer = world.new_buffer()
    args = (None, 0, world.draw, False, world.stopped)
    expected = world.collector()(buffer, *args)
    place, count = world.place, len(world.batches)
    resumed = saved(world, buffer)
    metrics = world.collector()(resumed, *args)
    assert (world.place, len(world.batches)) == (place, count)
    assert state_of(resumed) == state_of(buffer)
    names = [n for n in expected if n.startswith(("zero", "rollout/carried"))]
    assert {n: metrics[n] for n in names} == {n: expected[n] for n in names}


def test_growth_doubles_uniform_groups_in_rounds(undisturbed):
    steps, world = undisturbed["growth"]
    groups: dict = {}
    for keys, *_ in steps:
        for key in keys:
            groups.setdefault(key[:2], []).append(drawn(key)[1])
    assert {len(rewards) for rewards in groups.values()} >= {2, 4}
    for rewards in groups.values():
        n = len(rewards)
        assert n in (2, 4, 7) and (n == 7 or np.ptp(rewards) > 0)
        assert n == 2 or np.ptp(rewards[: {4: 2, 7: 4}[n]]) == 0
    for keys in world.batches:
        indices = {key.index for key in keys}
        assert any(indices <= part for part in ({0, 1}, {2, 3}, {4, 5, 6})), indices


def test_partial_rollouts_carry_what_had_begun_and_its_tokens_keep_their_version(undisturbed):
    steps, _ = undisturbed["partial"]
    assert [step[2]["rollout/carried_groups"] for step in steps] == [2, 2, 0]
    mixed = [v for step in steps for v in step[3] if len(set(v[3:])) > 1]
    assert mixed and all(v == sorted(v) for v in mixed)


def test_a_prompt_that_is_in_flight_cannot_come_again_at_the_same_visit():
    world = World("plain")
    buffer = world.new_buffer()
    buffer.add(world.draw(1))
    with pytest.raises(ValueError, match="prompt 1000 is in flight at visit 0 already"):
        buffer.add([world.find(1000, 0)])


def test_the_route_buffer_lends_rows_and_holds_memory_only_while_it_must():
    buffer = RouteBuffer(*ROUTES, 2, 3)
    assert buffer.rows is None and len(buffer) == 6
    first, second = buffer.allocate(), buffer.allocate()
    assert (first, second) == (0, 3) and buffer.read(np.arange(6)) is buffer.rows
    with pytest.raises(ValueError, match="all 2 groups of the route buffer are in flight"):
        buffer.allocate()
    buffer.rows = buffer.rows.at[3:].set(4)
    routes = np.asarray(buffer.read(np.array([4, 99, 0]))).ravel()
    np.testing.assert_array_equal(routes, [4, 255, 255])
    buffer.free(first)
    assert buffer.allocate() == 0 and buffer.rows is not None
    buffer.free(0)
    buffer.free(3)
    assert buffer.rows is None
