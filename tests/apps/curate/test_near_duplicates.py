"""Near-duplicates against a comparison of every pair, whatever the batches."""

import random

import pytest

from benchmarks import near_duplicates
from compass_jax.apps.curate.duplicates import CROWD, LEAST_RECALL, Batch, NearDuplicates, jaccard
from compass_jax.apps.curate.sample import Sample


def sample(text):
    return Sample("x", [{"role": "user", "content": text}], (), 3)


def kept_of(samples, threshold, size=100, index=None):
    """Returns the places of the samples that stay, decided in batches of `size`."""
    kept_places = []
    index = index or NearDuplicates(threshold, lambda row: samples[kept_places[row]].shingles)
    for first in range(0, len(samples), size):
        batch = Batch(index, samples[first : first + size])
        for place in range(len(samples[first : first + size])):
            if batch.near_duplicate(place) is None:
                assert batch.keep(place) == len(kept_places)
                kept_places.append(first + place)
        batch.close()
    return kept_places


def by_every_pair(samples, threshold):
    """Returns the places of the samples that stay when each row is compared with all kept rows."""
    kept_places = []
    for place, one in enumerate(samples):
        shingles = set(one.shingles.tolist())
        kept_samples = (samples[i] for i in kept_places)
        shingle_sets = (set(x.shingles.tolist()) for x in kept_samples if x.numbers == one.numbers)
        if not any(len(shingles & x) >= threshold * len(shingles | x) for x in shingle_sets):
            kept_places.append(place)
    return kept_places


def edited(rng, words, count):
    words = list(words)
    for i in rng.sample(range(len(words)), count):
        words[i] = f"new{rng.choice('abcdefgh')}"
    return words


@pytest.fixture(scope="module")
def corpus():
    """Returns texts of 50 words; half of them are an earlier text with up to five words changed."""
    rng, texts = random.Random(0), []
    for _ in range(250):
        if texts and rng.random() < 0.5:
            words = edited(rng, rng.choice(texts), rng.randrange(6))
        else:
            words = [
                f"word{rng.choice('abcdefghijklmnop')}{rng.choice('qrstuvw')}" for _ in range(50)
            ]
        texts.append(words)
    return [sample(" ".join(words)) for words in texts]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_what_stays_is_what_a_comparison_of_every_pair_leaves(corpus, threshold):
    actual, expected = kept_of(corpus, threshold), by_every_pair(corpus, threshold)
    # The index removes at least the share of true near-duplicates that its bands promise, and no
    # other row.
    assert set(expected) <= set(actual)
    assert len(corpus) - len(actual) >= LEAST_RECALL * (len(corpus) - len(expected))
    assert 0.4 * len(corpus) < len(expected) < len(corpus) - 10


def test_decisions_do_not_depend_on_batches(corpus):
    assert kept_of(corpus, 0.7, 1) == kept_of(corpus, 0.7, 64) == kept_of(corpus, 0.7, 250)


def test_a_near_duplicate_among_thousands_of_one_template_is_found_and_nothing_else():
    rng = random.Random(1)
    frame = [f"frame{c}{d}" for c in "abcde" for d in "abcdef"]
    filled = [frame + [f"slot{rng.getrandbits(40):x}" for _ in range(20)] for _ in range(600)]
    twin = [*filled[300][:-1], "other"]
    digits = str.maketrans("0123456789", "ghijklmnop")  # since numbers alone make rows different
    samples = [sample(" ".join(words).translate(digits)) for words in [*filled, twin]]
    assert jaccard(samples[0].shingles, samples[1].shingles) > 0.4
    read = []
    index = NearDuplicates(0.7, lambda row: read.append(row) or samples[row].shingles)
    assert kept_of(samples, 0.7, 50, index) == list(range(600))
    assert read == [300]  # no other row's text was read


def test_other_numbers_are_another_question_however_long_the_text():
    long = "in a town of the north a baker sells bread on every day of the week at a price of"
    three, five, twin = (sample(f"{long} {n}") for n in ("3 euros", "5 euros", "3 dollars"))
    assert jaccard(three.shingles, five.shingles) > 0.7
    assert kept_of([three, five, twin], 0.7) == [0, 1]


def test_a_row_without_words_is_nobodys_duplicate():
    assert kept_of([sample("..."), sample("?!"), sample("...")], 0.7) == [0, 1, 2]


def test_a_crowd_counts_the_rows_of_the_batch_too():
    """A bucket becomes a crowd at the same row, wherever a batch ends."""
    samples = [sample(f"all these words are the same {'x' * i}") for i in range(CROWD + 6)]
    assert kept_of(samples, 0.3, 1) == kept_of(samples, 0.3, 9) == kept_of(samples, 0.3, 1000)


def test_edited_word_problems_are_found_and_others_of_their_template_are_not(tmp_path):
    """The measurement of docs/results.md holds on fewer rows too."""
    rows = near_duplicates.corpus(400, 3)
    scores = near_duplicates.found_in(rows, tmp_path, 0.7)
    assert scores["precision"] >= 0.95 and scores["recall"] >= 0.95
    assert scores["near_duplicates"] > 100 and min(scores["recall_of"].values()) > 0.8
