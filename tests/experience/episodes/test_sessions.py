"""The branches of an episode, by hand."""

import numpy as np
import pytest
from played import tasks

from compass_jax.base.records import GIVEN
from compass_jax.experience.episodes.sessions import MOST_BRANCHES, Refused, Session
from compass_jax.rollout.request import Columns

END = frozenset({1})
OUTSIDE = 99


def session(most_tokens=20, most_prompt=8, most_turns=3):
    (task,) = tasks(1)
    return Session(task.sample(2), task, 2, OUTSIDE, most_tokens, most_prompt, most_turns)


def ask(one, tokens, limit=4, **options):
    return one.ask(np.asarray(tokens, np.int32), limit, 7, 0.0, **options)


def reply(one, tokens, new, **options):
    """Returns the tokens of a turn that answers `new`."""
    request = ask(one, tokens, **options)
    values = np.full(len(new), -1.5, np.float32)
    request.take(Columns.of(np.asarray(new), values, -values, 7).rows())
    one.of(request).take(request)
    return [*tokens, *new]


def test_what_goes_on_is_one_branch_and_what_does_not_is_another():
    one = session()
    history = reply(one, [5, 6], [7, 8])
    history = reply(one, [*history, 9], [4, 1])
    reply(one, [5, 6, 7], [3])  # a part of the history is no history
    assert [x.tokens.tolist() for x in one.branches] == [[5, 6, 7, 8, 9, 4, 1], [5, 6, 7, 3]]
    rollout = one.sample(END)
    assert rollout.tokens.tolist() == history and not rollout.truncated
    assert rollout.versions.tolist() == [GIVEN, GIVEN, 7, 7, GIVEN, 7, 7]
    assert rollout.logp.tolist() == [0, 0, -1.5, -1.5, 0, -1.5, -1.5]
    assert rollout.entropy.tolist() == [0, 0, 1.5, 1.5, 0, 1.5, 1.5]
    assert (rollout.row, rollout.sample, rollout.sampled_length) == (2, 2, 4)
    assert (one.turns, one.sampled) == (3, 5)


def test_a_turn_that_was_cancelled_leaves_no_mark():
    one = session()
    history = reply(one, [5, 6], [7])
    request = ask(one, [*history, 9, 9, 9])
    one.of(request).request = None
    assert reply(one, [*history, 4], [1]) == [5, 6, 7, 4, 1]
    assert len(one.branches) == 1 and one.sample(END).tokens.tolist() == [5, 6, 7, 4, 1]


def test_a_first_request_that_was_cancelled_is_begun_again_in_its_place():
    one = session()
    request = ask(one, [5, 6])
    one.of(request).request = None
    reply(one, [8, 8, 8], [4])
    assert [x.number for x in one.branches] == [0] and one.sample(END).row == 2


def test_two_requests_at_once_are_two_branches_with_other_draws():
    one = session()
    first, second = ask(one, [5, 6]), ask(one, [5, 6])
    assert first.column == 2 and second.column == 2 + 2**16
    assert (first.row, second.row) == (2, OUTSIDE)


def test_a_trained_branch_without_a_row_is_routed_live():
    one = session()
    reply(one, [5], [7])
    reply(one, [6], [7, 7, 7])
    rollout = one.sample(END)
    assert rollout.row == OUTSIDE and rollout.truncated and rollout.tokens.tolist() == [6, 7, 7, 7]


def test_agents_share_no_history():
    one = session()
    history = reply(one, [5], [7], agent="a")
    reply(one, [*history, 6], [7, 7], agent="b")
    assert [(x.agent, x.sampled) for x in one.branches] == [("a", 1), ("b", 2)]
    assert one.sample(END, "a").tokens.tolist() == [5, 7]
    assert one.sample(END).tokens.tolist() == [5, 7, 6, 7, 7]
    assert one.sample(END, "c").sampled_length == 0


def test_limits_are_refused_with_their_numbers():
    one = session()
    with pytest.raises(Refused, match=r"20 tokens leave .* maximum context length .* is 20 tokens"):
        ask(one, [5] * 20)
    with pytest.raises(Refused, match=r"9 tokens continue no earlier request, .* at most 8"):
        ask(one, [5] * 9)
    assert ask(one, [5] * 8, limit=100).limit == 20
    for n in range(1, MOST_BRANCHES):
        ask(one, [n])
    with pytest.raises(Refused, match=f"none of the episode's {MOST_BRANCHES} histories"):
        ask(one, [5, 5])
    with pytest.raises(Refused, match=r"the history has 3 replies, .* turns"):
        long, history = session(), [5]
        for n in range(4):
            history = reply(long, history, [n])
    assert reply(long, [6], [7]) == [6, 7]  # another history has turns of its own
    with pytest.raises(Refused, match="the episode has had 96 replies"):
        other = session()
        for _ in range(97):
            other.of(ask(other, [5])).request = None
