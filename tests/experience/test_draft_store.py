"""The draft store (keeping, forgetting and restoring drafts), the account of drafted tokens, and
refused settings.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from evolve import evolve
from tiny import make_prompt
from tiny_run import tiny_run

from compass_jax.base.records import SAMPLED, Draft, Group, Rollout, Score
from compass_jax.config import ConfigError, RLConfig
from compass_jax.experience.assemble import assemble
from compass_jax.experience.drafts import (
    DraftStore,
    check_turns,
    draft_counts,
)
from compass_jax.experience.history import outcome
from compass_jax.rollout.drafts import Coupled, Lenient
from compass_jax.training import memory
from compass_jax.training.hooks.base import StepRecord
from compass_jax.training.hooks.drafts import DraftAccount
from compass_jax.weights.state import joined, split


def group(number, visit, lengths=(3, 5), drafted=(0, 0), draft_tokens=(0, 0)):
    """Returns a group whose answers have `lengths` tokens."""
    prompt = make_prompt(number, 4, visit)
    rollouts = []
    for i, n in enumerate(lengths):
        new = np.arange(n, dtype=np.int32) + 10 * i + visit
        tokens = np.concatenate([prompt.tokens, new])
        logp = np.concatenate([np.zeros(4), -0.5 - new]).astype(np.float32)
        versions = np.zeros(4 + n, np.int32)
        counts = drafted[i], draft_tokens[i]
        rollouts.append(Rollout(prompt, i, tokens, logp, logp, False, versions, i, *counts))
    return Group(prompt, tuple(rollouts), tuple(Score(float(i), True) for i in range(len(lengths))))


def keys(number, visit, n=2):
    return [make_prompt(number, 4, visit).sample(i) for i in range(n)]


def found(store, keys):
    return {key: draft for key in keys if (draft := store.find(key)) is not None}


def test_the_last_visits_answers_are_found_by_their_index():
    store = DraftStore(Lenient())
    store.add([group(0, 0), group(1, 0)])
    store.add([group(0, 1, (2,))])
    drafts = found(store, [*keys(0, 2), *keys(1, 1), *keys(2, 0)])
    assert set(drafts) == {keys(0, 2)[0], *keys(1, 1)}  # sample 1 was not drawn at the last visit
    assert drafts[keys(0, 2)[0]].tokens.tolist() == [1, 2]
    np.testing.assert_array_equal(drafts[keys(1, 1)[1]].logp, -0.5 - np.arange(10, 15))
    assert store.tokens == 2 + 8


def test_coupled_drafts_are_of_visits_that_share_noise():
    store = DraftStore(Coupled(refresh=3))
    store.add([group(0, 1)])
    assert set(found(store, keys(0, 2))) == set(keys(0, 2)) and found(store, keys(0, 3)) == {}


def test_the_prompts_visited_longest_ago_are_forgotten():
    store = DraftStore(Lenient(kept_tokens=20))
    store.add([group(0, 0), group(1, 0)])
    store.add([group(0, 1)])  # now prompt 1 is the oldest
    store.add([group(2, 0)])
    assert store.tokens == 16 and not found(store, keys(1, 1))
    assert found(store, keys(0, 2)) and found(store, keys(2, 1))
    store.add([group(3, 0, (15, 15))])  # more tokens than the store keeps
    assert store.tokens == 0 and not store.state()["prompts"]


def test_a_checkpoint_holds_the_drafts_in_order():
    store = DraftStore(Lenient(kept_tokens=20))
    store.add([group(0, 0), group(1, 0, (4,))])
    plain, arrays = split(store.state())
    state = joined(json.loads(json.dumps(plain)), arrays)
    restored = DraftStore(Lenient(kept_tokens=20))
    restored.restore(state)
    for target in (store, restored):
        target.add([group(2, 0, (9,))])  # the oldest goes
    assert restored.tokens == store.tokens == 13
    jax.tree.map(np.testing.assert_array_equal, restored.state(), store.state())
    fewer = DraftStore(Lenient(kept_tokens=5))
    fewer.restore(state)
    assert fewer.tokens == 4 and found(fewer, keys(1, 1, 1))
    draft = fewer.find(keys(1, 1, 1)[0])
    assert isinstance(draft, Draft) and draft.tokens.dtype == np.int32
    anew = DraftStore(Lenient())
    anew.restore(None)  # a checkpoint from before the run had drafts
    assert anew.tokens == 0


def test_drafted_tokens_are_no_sampled_ones():
    groups = [group(0, 1, (3, 5), (2, 0), (3, 4)), group(1, 0, (4, 4))]
    counts = DraftStore(Lenient()).decided(groups)
    assert counts == {"drafts/used": 2, "drafts/scored_tokens": 7, "waste/tokens_drafted": 2}
    assert [r.sampled_length for r in groups[0].rollouts] == [1, 5]
    of_group = outcome(groups[0], tiny_run().rewards)
    assert (of_group.response_tokens, of_group.given_tokens) == (8, 2)
    arrays = assemble(groups, 2, 12, 2)
    step = StepRecord(1, groups, arrays=arrays, metrics=dict(counts))
    DraftAccount().on_arrays(step)
    sampled = arrays.columns[SAMPLED]
    np.testing.assert_array_equal(sampled[0], arrays.mask[0] & (np.arange(12) >= 6))
    np.testing.assert_array_equal(sampled[1:], arrays.mask[1:])
    assert step.metrics["drafts/accepted_frac"] == 2 / 7
    step.metrics |= draft_counts(groups[1:])
    DraftAccount().on_arrays(step)
    assert step.metrics["drafts/accepted_frac"] == 0


REFUSED = {
    "lenience": (Lenient(lenience=0.9), "rl.drafts.lenience = 0.9: must be at least 1"),
    "refresh": (Coupled(refresh=0), "rl.drafts.refresh = 0: must be at least 2"),
    "no refresh": (Coupled(refresh=1), "at 1 no two visits share noise"),
    "no store": (Lenient(kept_tokens=0), "rl.drafts.kept_tokens = 0: must be positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_drafts_that_mean_nothing_are_refused(name):
    drafts, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        RLConfig(drafts=drafts).validate("rl")
    RLConfig(drafts=dataclasses.replace(Lenient(), lenience=1.0)).validate("rl")


def test_drafts_of_conversations_are_refused():
    prompts = [make_prompt(0, 4), dataclasses.replace(make_prompt(1, 4), turns=3, label="shop")]
    with pytest.raises(ConfigError, match=r"rl\.drafts\.name = 'coupled'.*'shop'.*environment"):
        check_turns(Coupled(), prompts)
    check_turns(Coupled(), prompts[:1])


def test_memory_of_the_drafts_is_estimated_and_too_much_is_refused(monkeypatch):
    config = tiny_run()
    drafting = evolve(config, rl={"drafts": Lenient(kept_tokens=2**20)})
    with_drafts, without = (memory.estimate(x.policy, x.rl).process for x in (drafting, config))
    more = with_drafts - without
    assert more * jax.local_device_count() == pytest.approx(2 * 8 * 2**20)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2.0**24)
    memory.check_drafts(drafting.rl)
    memory.check_drafts(config.sft)
    large = dataclasses.replace(drafting.rl, drafts=Coupled(kept_tokens=2**20 + 1))
    with pytest.raises(ConfigError, match=r"rl\.drafts\.kept_tokens.*are free; lower it"):
        memory.check_drafts(large)
