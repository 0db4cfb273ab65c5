import json

import numpy as np
import pytest

from compass_jax.base.records import Prompt
from compass_jax.data.files import DataError
from compass_jax.data.stream import PromptStream, Share, ShuffledStream


def make(n, answer="0"):
    return [Prompt(100 + i, 0, "x", f"q{i}", np.asarray([i], np.int32), answer) for i in range(n)]


def draw(stream, batches, size):
    return [[(p.id, p.visit) for p in stream.next_batch(size)] for _ in range(batches)]


def test_each_epoch_is_a_permutation_of_its_own_and_visits_count_epochs():
    stream = PromptStream(make(37), seed=5)
    flat = [pair for batch in draw(stream, 37, 3) for pair in batch]
    epochs = [[i for i, visit in flat if visit == epoch] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(100, 137)) for epoch in epochs)
    assert [visit for _, visit in flat] == [0] * 37 + [1] * 37 + [2] * 37
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != sorted(epochs[0])
    assert stream.epoch == 3.0
    assert draw(PromptStream(make(37), seed=6), 1, 37)[0] != flat[:37]


def test_the_order_of_a_seed_is_that_of_runs_before():
    stream = PromptStream(make(11), seed=1)
    assert [p.id - 100 for p in stream.next_batch(11)] == [5, 7, 6, 0, 4, 8, 9, 2, 10, 3, 1]
    assert [p.id - 100 for p in stream.next_batch(11)] == [8, 4, 1, 7, 6, 9, 3, 2, 0, 5, 10]
    shares = Share(4, 1.0), Share(5, 3.0)
    mixed = ShuffledStream(range(9), map(str, range(9)), 3, shares)
    assert [x for x, _ in mixed.take(12)] == [2, 5, 4, 8, 3, 7, 6, 8, 0, 4, 6, 7]


@pytest.mark.parametrize("done", [0, 1, 7, 20])
def test_restore_continues_exactly(done):
    uninterrupted = draw(PromptStream(make(11), seed=1), done + 9, 4)
    first = PromptStream(make(11), seed=1)
    draw(first, done, 4)
    state = json.loads(json.dumps(first.state()))
    second = PromptStream(make(11), seed=1)
    draw(second, 2, 4)
    second.restore(state)
    assert draw(second, 9, 4) == uninterrupted[done:]


@pytest.mark.parametrize(
    ("items", "seed", "named"),
    [
        (make(10), 1, "items"),
        (make(11), 2, "seed"),
        (make(11, "1"), 1, "fingerprint"),
        (make(11)[::-1], 1, "fingerprint"),
    ],
)
def test_restore_over_other_data_is_refused(items, seed, named):
    state = PromptStream(make(11), seed=1).state()
    with pytest.raises(DataError, match=f"differ from this run's: {named} was"):
        PromptStream(items, seed).restore(state)


def test_a_prompt_is_found_by_its_id_and_a_missing_one_is_named():
    stream = PromptStream(make(11), seed=1)
    prompt = stream.find(104, 3)
    assert (prompt.id, prompt.question, prompt.visit) == (104, "q4", 3)
    with pytest.raises(DataError, match="a prompt with id 99, which this run's data lack"):
        stream.find(99, 0)


def test_nothing_to_stream_is_an_error():
    with pytest.raises(DataError, match="no training items"):
        PromptStream([], seed=0)


def test_repeats_come_in_one_pass_each_as_a_visit_of_its_own():
    """A prompt of a source with repeat 3 comes three times per pass, each time as another visit;
    the other prompts come once.
    """
    prompts = [Prompt(i, i % 2, "", f"q{i}", np.array([i], np.int32), "") for i in range(4)]
    stream = PromptStream(prompts, 5, [1, 3])
    for epoch in range(2):
        seen = sorted((p.id, p.visit) for p in stream.next_batch(8))
        assert seen == sorted(
            [(i, epoch) for i in (0, 2)]
            + [(i, 3 * epoch + copy) for i in (1, 3) for copy in range(3)]
        )


def test_rows_that_ask_the_same_are_visits_of_their_own_and_are_found_by_them():
    """Two rows have one question and different answers. A prompt's identity is (id, visit), so no
    visit comes twice, and each leads back to its row.
    """
    rows = [*make(2), *make(1, "another")]
    stream = PromptStream(rows, 0)
    drawn = stream.next_batch(6)
    assert len({prompt.key for prompt in drawn}) == 6
    for prompt in drawn:
        assert stream.find(*prompt.key).answer == prompt.answer
