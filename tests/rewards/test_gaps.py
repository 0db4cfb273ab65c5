"""The smallest difference between two rewards: verifiers declare it, and sums compute it."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compass_jax.config import ConfigError, FileSource, ProceduralSource, RewardConfig, TaskSource
from compass_jax.config.verifiers import Spread, smallest_gap, summed

SAYS = """
from compass_jax.rewards.tasks import Environment, Task

def silent(response): return 0.0
def tenths(response): return 0.0
def three(response): return 0.0
def half(response): return 0.0
def absurd(response): return 0.0
def tens(response): return 0.0
tenths.gap = 0.1
three.range = (-1, 1)
half.range = (0, 0.5)
absurd.gap = -1
tens.gap = 10
task = Task(lambda seed: [], {three: 1.0, "format": 0.3})
usual = Task(lambda seed: [])
wordy = Task(lambda seed: [], {"math": "much"})
talk = Task(lambda seed: [], Environment(dict, print))
fine = Task(lambda seed: [], Environment(dict, print, turn_range=(-1, 1), turn_gap=0.25))
later = Task(lambda seed: [], Environment(dict, print, turns=2, discount=0.9))
"""


@pytest.mark.parametrize(
    ("verifier", "gap"),
    [
        ("silent", 1.0),
        ("tenths", 0.1),
        ("three", 1.0),
        ("half", 0.5),
        ("tens", 10.0),
        ({"tenths": 1.0, "format": 0.25}, 0.05),  # the closest sums are 0.3 and 0.25
        ({"three": 0.5, "math": 0.7}, 0.2),
        ({"silent": 1.0, "reasoning_gym": 0.3}, 0.3),
        ("task", 0.3),
        ("usual", 1.0),
        ("talk", 1.0),
        ("fine", 0.25),
        ("later", 0.1),  # 1 in the first turn, 0.9 in the second
    ],
)
def test_the_smallest_gap_is_what_the_verifiers_say_of_themselves(verifier, gap, tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    usual = ("format", "math", "reasoning_gym")

    def named(name):
        return name if name in usual else f"{tmp_path}/says.py:{name}"

    if verifier in ("task", "usual", "talk", "fine", "later"):
        source = TaskSource(named(verifier))
    else:
        weights = {verifier: 1.0} if isinstance(verifier, str) else verifier
        source = ProceduralSource("products", verifier={named(k): x for k, x in weights.items()})
    smallest = smallest_gap([("a", source)], RewardConfig())
    assert smallest == (pytest.approx(gap, abs=1e-9), "a")
    smallest_of_two = smallest_gap([("a", source), ("b", FileSource("r.jsonl"))], RewardConfig())
    assert smallest_of_two == (pytest.approx(min(gap, 1.0), abs=1e-9), "b" if gap > 1 else "a")
    declared = smallest_gap([("a", source)], RewardConfig(smallest_gap=0.01))
    assert declared == (0.01, "rewards.smallest_gap")


def test_what_a_function_says_of_its_rewards_is_refused_where_it_cannot_be_meant(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    source = FileSource("r.jsonl", verifier=f"{tmp_path}/says.py:absurd")
    with pytest.raises(ConfigError, match=r"s\.verifier: absurd says .*gap = -1; the range must"):
        smallest_gap([("s", source)], RewardConfig())
    wordy = TaskSource(f"{tmp_path}/says.py:wordy")
    with pytest.raises(ConfigError, match=r"s\.task: 'math' has the weight 'much'; write a number"):
        smallest_gap([("s", wordy)], RewardConfig())


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(-30, 30)), min_size=1, max_size=3),
)
def test_the_gap_of_a_weighted_sum_is_the_least_difference_of_two_sums(parts):
    parts = [(steps, Fraction(weight, 10)) for steps, weight in parts if weight]
    assume(parts)
    grids = [[weight * Fraction(i, steps) for i in range(steps + 1)] for steps, weight in parts]
    sums = sorted({sum(values) for values in itertools.product(*grids)})
    least = min(b - a for a, b in itertools.pairwise(sums))
    spreads = [(Spread(0.0, 1.0, 1 / steps), float(weight)) for steps, weight in parts]
    assert summed(spreads).gap == pytest.approx(float(least), abs=1e-8)
