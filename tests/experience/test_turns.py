"""Conversations with an environment: the environment's tokens have routes and no gradient, and a
conversation is the same bit for bit in any slots, and after a kill in the middle.
"""

import dataclasses
import json
from collections import deque

import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, UNSET, make_prompt, random_params

from compass_jax.base.errors import UserError
from compass_jax.base.records import GIVEN, Group, Rollout, Score
from compass_jax.config import RewardConfig, RLConfig
from compass_jax.experience import saved_samples
from compass_jax.experience.assemble import assemble
from compass_jax.experience.collect import Collector, new_buffer
from compass_jax.experience.history import outcome
from compass_jax.experience.metrics import staleness
from compass_jax.experience.turns import Turns
from compass_jax.model.params import to_decode
from compass_jax.rl.prepare import RewardScale, UpdateRows
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.slots import Slots
from compass_jax.training import step
from compass_jax.weights.state import joined, split

pytestmark = pytest.mark.usefixtures("fully_optimised")
TURNS, LENGTH = 3, 40
LOOSE = to_decode(random_params())
ROLL = dataclasses.replace(ROLLOUT, max_new_tokens=24, cache_bucket=40)
ENGINES = {
    slots: Engine(MODEL, COMPUTE, dataclasses.replace(ROLL, slots=slots), EOS) for slots in (2, 6)
}
RL = RLConfig(prompts_per_step=4, group_size=4, step_policy=None)
PROMPTS = [dataclasses.replace(make_prompt(i, 4 + i), turns=TURNS) for i in range(4)]


def words(tokens):
    return " ".join(map(str, tokens))


def encode(says, turn=()):
    """Returns the tokens of an environment's message, which is a list of token ids."""
    return [int(x) for x in says.split()]


def answer(texts):
    """Returns the environment's reply to these turns, which depends on all of them."""
    tokens = [int(x) for text in texts for x in text.split()]
    return words([2 + (sum(tokens) + i) % 37 for i in range(1 + len(texts) % 2)])


class World:
    """A collector over the tiny engine. Its verifier is an environment that always continues, and
    hangs for every seventh sample. `stop_at`: the number of calls of `stopped` after which a stop
    comes.
    """

    def __init__(self, slots=6, prompts=PROMPTS, stop_at=None):
        self.engine, self.prompts = ENGINES[slots], prompts
        self.stop_checks, self.stop_at, self.waiting = 0, stop_at, []
        self.buffer = new_buffer(self.engine, RL)

    def submit(self, key, prompt, response):
        self.waiting.append((key, json.loads(response()) if prompt.turns else None))

    def collect(self, block):
        submitted, self.waiting = self.waiting, []
        return [(key, self.score(key, texts)) for key, texts in submitted]

    def score(self, key, texts):
        if (key.prompt + key.index) % 7 == 0:
            return Score(0.0, False, "timeout")
        reward = float(key.index % 2)
        return Score(reward, True, says="" if texts is None else answer(texts))

    slow = False

    def stopped(self):
        self.stop_checks += 1
        return self.stop_at is not None and self.stop_checks >= self.stop_at

    def run(self):
        collector = Collector(
            self.engine,
            self,
            Turns(words, encode, ROLL.max_new_tokens),
            lambda prompt: float("nan"),
            RL,
            RewardConfig(),
            0,
        )
        draw = lambda n: self.prompts[:n]  # noqa: E731
        return collector(self.buffer, LOOSE, 5, draw, True, self.stopped)

    def killed(self):
        """Returns a new process that continues from the checkpoint of this one."""
        state, arrays = split(saved_samples.state(self.buffer))
        state = joined(json.loads(json.dumps(state)), arrays)
        other = World(prompts=self.prompts)
        prompts = {prompt.key: prompt for prompt in self.prompts}
        saved_samples.restore(other.buffer, state, lambda *key: prompts[key])
        return other

    def results(self):
        """Returns each sample's arrays, its score and its routes, by key."""
        groups = self.buffer.step_groups()
        rows = np.asarray(self.buffer.routes.rows)
        return {
            r.key: (r.tokens, r.logp, r.entropy, r.versions, score, rows[r.row])
            for group in groups
            for r, score in zip(group.rollouts, group.scores, strict=True)
        }


def assert_equal(one, other):
    assert set(one) == set(other) and len(one) == 16
    for key, parts in one.items():
        for actual, expected in zip(parts, other[key], strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.fixture(scope="module")
def undisturbed():
    world = World()
    assert world.run() is not None
    return world


def test_a_conversation_is_what_was_sampled_and_what_the_environment_said(undisturbed):
    groups = undisturbed.buffer.step_groups()
    lengths = set()
    for rollout in (r for group in groups for r in group.rollouts):
        from_environment = ~rollout.generated
        texts = [
            words(x)
            for x in np.split(rollout.response, np.flatnonzero(np.diff(from_environment)) + 1)
        ]
        lengths.add(len(rollout.turns))
        for n in range(len(rollout.turns) - 1):
            assert rollout.turns[n][-1] == EOS
            assert texts[2 * n + 1] == answer([words(x) for x in rollout.turns[: n + 1]])
        assert len(rollout.turns) <= TURNS and rollout.response_length <= ROLL.max_new_tokens
        logp = rollout.logp[len(rollout.prompt.tokens) :]
        assert not logp[from_environment].any() and (logp[~from_environment] < 0).all()
        assert set(rollout.versions[len(rollout.prompt.tokens) :][from_environment]) <= {GIVEN}
    assert lengths == {1, 2, 3}
    assert staleness(groups, 7) == {"staleness": 2.0, "staleness_max": 2.0}


def test_a_hanging_environment_costs_its_samples_alone(undisturbed):
    """The samples end with the turn that it did not answer, and their scores are unknown."""
    for key, (*_, versions, score, _) in undisturbed.results().items():
        hangs = (key.prompt + key.index) % 7 == 0
        assert score.known is not hangs and score.says == ""
        assert not hangs or GIVEN not in versions


def test_what_the_environment_said_has_routes_and_no_gradient(undisturbed):
    """The mask is that of the sampled tokens, and no other token has a weight."""
    groups = undisturbed.buffer.step_groups()
    routes = undisturbed.buffer.routes_of(groups)
    arrays = assemble(groups, 4, LENGTH, 2, routes)
    rows = np.arange(16)
    inputs = UpdateRows(
        arrays.mask,
        arrays.reward,
        arrays.known,
        arrays.group,
        np.ones_like(arrays.rollout_logp),
        arrays.rollout_logp,
        arrays.rollout_logp,
        repetition=arrays.repetition,
    )
    scale = RewardScale(1.0, 0.0, max_new_tokens=24)
    prepared, _ = step.prepare(inputs, n_groups=4, config=RL, scale=scale)
    rollouts = [r for group in groups for r in group.rollouts]
    from_environment = np.zeros_like(arrays.mask)
    for row, rollout in zip(rows, rollouts, strict=True):
        n, start = len(rollout.tokens), len(rollout.prompt.tokens)
        from_environment[row, start:n] = rollout.versions[start:] == GIVEN
        assert (np.asarray(routes[row])[: n - 1] != UNSET).all()
        assert (np.asarray(routes[row])[n - 1 :] == UNSET).all()
        assert arrays.mask[row].sum() == rollout.generated.sum()
    assert from_environment.sum() > 10 and not arrays.mask[from_environment].any()
    weight = np.asarray(prepared.weight)
    assert (
        not weight[from_environment].any()
        and (weight[arrays.mask & arrays.known[:, None]] > 0).all()
    )


def test_turns_keep_the_tokens_log_probs_and_routes_with_which_they_were_sampled(undisturbed):
    """The first turn is that of a run without an environment, bit for bit."""
    alone = World(prompts=[dataclasses.replace(prompt, turns=0) for prompt in PROMPTS])
    alone.run()
    talked = undisturbed.results()
    for key, (tokens, logp, entropy, versions, _, routes) in alone.results().items():
        first = len(tokens)
        if tokens[-1] != EOS:
            continue  # cut at another token limit
        for value, longer in zip((tokens, logp, entropy, versions), talked[key], strict=False):
            np.testing.assert_array_equal(value, longer[:first])
        np.testing.assert_array_equal(routes[: first - 1], talked[key][-1][: first - 1])


def test_a_conversation_is_the_same_whatever_slots_it_passed_through(undisturbed, monkeypatch):
    """The same shapes give the same bits. With fewer slots the tokens and the routes are the same,
    and the log-probs differ in the last bits of a float32.
    """
    fewer = World(slots=2)
    assert fewer.run() is not None
    expected = undisturbed.results()
    for key, values in fewer.results().items():
        for n, (one, other) in enumerate(zip(expected[key], values, strict=True)):
            if n in (1, 2):  # logp, entropy
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
            else:
                np.testing.assert_array_equal(one, other)

    def from_the_end(self):
        return deque(reversed(real(self)))

    real, left_slots = Slots.free, []
    monkeypatch.setattr(Slots, "free", from_the_end)
    monkeypatch.setattr(Batcher, "_leave", noting(Batcher._leave, left_slots))
    turned = World()
    assert turned.run() is not None
    assert_equal(expected, turned.results())
    assert max(len({slot for k, slot in left_slots if k == key}) for key, _ in left_slots) > 1


def noting(real, left_slots):
    """Returns a `Batcher._leave` that also records the slots that samples leave."""

    def leave(self, requests):
        left_slots.extend((x.prompt.sample(x.column), x.slot) for x in requests)
        real(self, requests)

    return leave


def test_a_conversation_is_the_same_after_a_kill_wherever_it_came(undisturbed):
    """Kills in the second round are included: its samples were queued with the environment's
    reply.
    """
    waiting = set()
    for stop_at in range(1, undisturbed.stop_checks, 3):
        world = World(stop_at=stop_at)
        assert world.run() is None
        paused = [x.rollout for x in world.buffer.samples.values() if not x.done]
        waiting |= {len(rollout.turns) for rollout in paused}
        resumed = world.killed()
        assert resumed.run() is not None
        assert_equal(undisturbed.results(), resumed.results())
    assert waiting == {1, 2}


# ---- one turn, without a model -------------------------------------------------------------------


def talk(*versions, truncated=False, most=TURNS):
    prompt = dataclasses.replace(make_prompt(0, 2), turns=most)
    n = 2 + len(versions)
    zeros = np.zeros(n, np.float32)
    all_versions = np.array([0, 0, *versions], np.int32)
    return Rollout(prompt, 0, np.arange(n), zeros, zeros, truncated, all_versions, 0)


TALKS = Turns(words, encode, most_tokens=8)
SAID = Score(0.5, True, says="30 31")


def test_a_verifier_reads_the_turns_and_none_but_the_models():
    rollout = talk(4, 4, GIVEN, GIVEN, 5)
    assert json.loads(TALKS.text(rollout)) == ["2 3", "6"]
    assert TALKS.text(talk(4, GIVEN, 5, most=0)) == "2 3 4"


def test_an_environments_tokens_were_not_sampled():
    rollouts = (talk(4, 4, GIVEN, GIVEN, 5), talk(4))
    assert [rollout.sampled_length for rollout in rollouts] == [3, 1]
    result = outcome(Group(rollouts[0].prompt, rollouts, (SAID, SAID)), RewardConfig())
    assert (result.response_tokens, result.sampled_tokens) == (6, 4)


@pytest.mark.parametrize(
    ("rollout", "score"),
    [
        (talk(4), Score(0.5, True)),
        (talk(4, truncated=True), SAID),
        (talk(4, GIVEN, 4, GIVEN, 4), SAID),
        (talk(4, most=1), SAID),
        (talk(*[4] * 6), SAID),
    ],
    ids=["nothing said", "cut", "last turn", "one turn", "no token left"],
)
def test_a_conversation_is_over(rollout, score):
    same_rollout, verdict = TALKS.settled(rollout, score)
    assert same_rollout is rollout and verdict == Score(0.5, True)


def test_an_environment_that_is_slow_turn_after_turn_is_left_out_as_a_timeout():
    """A single call is fast enough, but the seconds add up for each conversation; the sum is
    dropped when the conversation ends.
    """
    turns, slow = Turns(words, encode, most_tokens=20), dataclasses.replace(SAID, spent=0.4)
    first, other = talk(4, most=9), dataclasses.replace(talk(4, most=9), sample=1)
    for rollout in (first, other, first):
        assert turns.settled(rollout, slow)[1] is None
    _, verdict = turns.settled(first, slow)
    assert verdict is not None and (verdict.known, verdict.outcome) == (False, "timeout")
    assert "rewards.conversation_s" in verdict.detail
    assert turns.settled(other, slow)[1] is None, "0.8 of its time"
    final = dataclasses.replace(slow, says="", spent=0.0)
    assert turns.settled(other, final) == (other, Score(0.5, True))
    assert turns.settled(first, slow)[1] is None and len(turns._spent) == 1


def test_the_last_answer_stands_however_slow_it_was():
    late = dataclasses.replace(SAID, spent=7.0)
    assert TALKS.settled(talk(4, most=1), late)[1] == Score(0.5, True)


def test_it_goes_on_while_a_token_is_left():
    rollout, verdict = TALKS.settled(talk(*[4] * 5), SAID)
    assert verdict is None and rollout.tokens[-2:].tolist() == [30, 31]
    assert rollout.versions[2:].tolist() == [4] * 5 + [GIVEN] * 2


def test_what_a_template_cannot_write_leaves_the_sample_out():
    def refuse(says, turn):
        raise UserError("no tool here")

    _, verdict = dataclasses.replace(TALKS, encode=refuse).settled(talk(4), SAID)
    assert verdict is not None and not verdict.known and verdict.detail == "no tool here"


def test_a_checkpoint_has_no_routes_of_a_turn_that_will_be_sampled_anew():
    """A turn that gave its pages to other samples has routes in its row and no tokens on the
    host.
    """
    world = World()
    world.buffer.add(PROMPTS[:1])
    paused = dataclasses.replace(talk(5, GIVEN), prompt=PROMPTS[0], row=1)
    world.buffer.put(paused, done=False)
    world.buffer.routes.rows = world.buffer.routes.rows.at[1].set(3)
    routes = np.asarray(saved_samples.state(world.buffer)["routes"])[1]
    assert (routes[:3] == 3).all() and (routes[3:] == UNSET).all()
