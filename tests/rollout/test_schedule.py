"""The order of requests: worked examples, and the makespan against first come, first served on a
long tail.
"""

import heapq
import math

import numpy as np

from compass_jax.rollout.schedule import evenly, longest_first


def test_the_longest_start_first_and_ties_keep_their_order():
    assert longest_first([3, 9, 3, 12, 0]) == [3, 1, 0, 2, 4] and longest_first([]) == []


def test_an_unknown_length_counts_as_the_mean():
    assert longest_first([1, math.nan, 9, 4]) == [2, 1, 3, 0]  # the mean is 4.67
    assert longest_first([math.nan] * 3) == [0, 1, 2]


def test_free_slots_are_filled_where_most_are_free():
    assert evenly([5, 0, 2], 6, 1) == [0, 2, 5]
    assert evenly([0, 1, 2, 4, 5, 6, 7, 11], 12, 3) == [4, 0, 5, 1, 6, 2, 7, 11]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        free = rng.permutation(32)[: rng.integers(0, 33)].tolist()
        order, left = evenly(free, 32, 4), np.bincount([slot // 8 for slot in free], minlength=4)
        assert sorted(order) == sorted(free)
        for slot in order:
            assert left[slot // 8] == left.max()
            left[slot // 8] -= 1


def makespan(lengths, order, slots):
    free = [0.0] * slots
    for i in order:
        heapq.heappush(free, heapq.heappop(free) + lengths[i])
    return max(free)


def test_it_ends_earlier_than_first_come_first_served_when_lengths_are_known_roughly():
    """There are 1,024 log-normal lengths on 64 slots, known to a factor of e^0.5. Longest-first is
    never slower on ten draws, and on average faster by a tenth.
    """
    gains = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(np.exp(np.log(64) + rng.standard_normal(1024)), 512)
        expected = lengths * np.exp(0.5 * rng.standard_normal(1024))
        gains.append(
            makespan(lengths, range(1024), 64) / makespan(lengths, longest_first(expected), 64)
        )
    assert min(gains) >= 1 and np.mean(gains) > 1.1
