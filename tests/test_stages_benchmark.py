"""The experiment on stages: its accounting by hand."""

import pytest

from benchmarks import stages


def row(variant, tokens, curve):
    shares = {"verifier_signal": 0.6, "none": 0.1}
    curve = [*curve, [tokens, 0.8]]
    fields = {"variant": variant, "seed": 0, "tokens": tokens, "shares": shares}
    return fields | {"accuracy": 0.8, "curve": curve}


def test_variants_are_compared_at_the_tokens_of_the_shortest_run():
    """The curve rises from 0.2 to 0.4 at 100 tokens and to 0.8 at 300: at 200 it is 0.6."""
    long, short = row("stages", 300, [[0, 0.2], [100, 0.4]]), row("shuffled", 200, [[0, 0.2]])
    assert stages.accuracy_at(long["curve"], 200) == pytest.approx(0.6)
    first, second = stages.report([long, short]).splitlines()[2:]
    height = (100 * 0.3 + 100 * 0.5) / 200
    assert first.startswith(f"| stages | 1 | 0.600 | {height:.3f} | 0.800 | 0 | 60 % | 10 % |")
    assert second.startswith("| shuffled | 1 | 0.800 | 0.500 | 0.800 |")
