"""Near-duplicates against a comparison of every pair, whatever the batches."""

import random

import pytest

from benchmarks import near_duplicates
from compass_jax.curate.duplicates import CROWD, LEAST_RECALL, Batch, NearDuplicates, jaccard
from compass_jax.curate.sample import Sample


def sample(text):
    return Sample("x", [{"role": "user", "content": text}], (), 3)


def kept_of(samples, threshold, size=100, index=None):
    """The places of the samples that stay, decided in batches of `size`."""
    kept = []
    index = index or NearDuplicates(threshold, lambda row: samples[kept[row]].shingles)
    for first in range(0, len(samples), size):
        batch = Batch(index, samples[first : first + size])
        for place in range(len(samples[first : first + size])):
            if batch.near_duplicate(place) is None:
                assert batch.keep(place) == len(kept)
                kept.append(first + place)
        batch.close()
    return kept


def by_every_pair(samples, threshold):
    """The same by sets, each row against all kept ones."""
    kept = []
    for place, one in enumerate(samples):
        mine = set(one.shingles.tolist())
        others = (samples[i] for i in kept)
        same = (set(x.shingles.tolist()) for x in others if x.numbers == one.numbers)
        if not any(len(mine & x) >= threshold * len(mine | x) for x in same):
            kept.append(place)
    return kept


def edited(rng, said, count):
    said = list(said)
    for i in rng.sample(range(len(said)), count):
        said[i] = f"new{rng.choice('abcdefgh')}"
    return said


@pytest.fixture(scope="module")
def corpus():
    """Texts of 50 words, half of them an earlier one with up to five words changed."""
    rng, made = random.Random(0), []
    for _ in range(250):
        if made and rng.random() < 0.5:
            said = edited(rng, rng.choice(made), rng.randrange(6))
        else:
            said = [
                f"word{rng.choice('abcdefghijklmnop')}{rng.choice('qrstuvw')}" for _ in range(50)
            ]
        made.append(said)
    return [sample(" ".join(said)) for said in made]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_what_stays_is_what_a_comparison_of_every_pair_leaves(corpus, threshold):
    found, wanted = kept_of(corpus, threshold), by_every_pair(corpus, threshold)
    # of what is an earlier row, as many as the bands promise are found; nothing else is taken
    assert set(wanted) <= set(found)
    assert len(corpus) - len(found) >= LEAST_RECALL * (len(corpus) - len(wanted))
    assert 0.4 * len(corpus) < len(wanted) < len(corpus) - 10


def test_decisions_do_not_depend_on_batches(corpus):
    assert kept_of(corpus, 0.7, 1) == kept_of(corpus, 0.7, 64) == kept_of(corpus, 0.7, 250)


def test_a_near_duplicate_among_thousands_of_one_template_is_found_and_nothing_else():
    rng = random.Random(1)
    frame = [f"frame{c}{d}" for c in "abcde" for d in "abcdef"]
    filled = [frame + [f"slot{rng.getrandbits(40):x}" for _ in range(20)] for _ in range(600)]
    twin = [*filled[300][:-1], "other"]
    digits = str.maketrans("0123456789", "ghijklmnop")  # which would be told apart by themselves
    samples = [sample(" ".join(said).translate(digits)) for said in [*filled, twin]]
    assert jaccard(samples[0].shingles, samples[1].shingles) > 0.4
    read = []
    index = NearDuplicates(0.7, lambda row: read.append(row) or samples[row].shingles)
    assert kept_of(samples, 0.7, 50, index) == list(range(600))
    assert read == [300]  # of all the others no text was looked at


def test_other_numbers_are_another_question_however_long_the_text():
    long = "in a town of the north a baker sells bread on every day of the week at a price of"
    three, five, twin = (sample(f"{long} {n}") for n in ("3 euros", "5 euros", "3 dollars"))
    assert jaccard(three.shingles, five.shingles) > 0.7
    assert kept_of([three, five, twin], 0.7) == [0, 1]


def test_a_row_without_words_is_nobodys_duplicate():
    assert kept_of([sample("..."), sample("?!"), sample("...")], 0.7) == [0, 1, 2]


def test_a_crowd_counts_the_rows_of_the_batch_too():
    """The row that makes a bucket a crowd is the same, wherever a batch ends."""
    same = [sample(f"all these words are the same {'x' * i}") for i in range(CROWD + 6)]
    assert kept_of(same, 0.3, 1) == kept_of(same, 0.3, 9) == kept_of(same, 0.3, 1000)


def test_edited_word_problems_are_found_and_others_of_their_template_are_not(tmp_path):
    """The measurement of docs/measurements.md, on fewer rows."""
    rows = near_duplicates.corpus(400, 3)
    found = near_duplicates.found_in(rows, tmp_path, 0.7)
    assert found["precision"] >= 0.95 and found["recall"] >= 0.95
    assert found["near_duplicates"] > 100 and min(found["recall_of"].values()) > 0.8
