"""The benchmarks of the rollout: their arithmetic by hand, and (slow) a smoke run of each."""

import json

import numpy as np
import pytest

from benchmarks import eight_bit, measures, same_tokens, slow_verifier
from compass_jax.base.records import Prompt, Rollout


def rollout(tokens, logp=None):
    prompt = Prompt(1, 0, "t", "q", np.array([5, 6], np.int32), "")
    tokens = np.array([5, 6, *tokens], np.int32)
    logps, n = np.array([0, 0, *(logp or [-1.0] * (len(tokens) - 2))], np.float32), len(tokens)
    return Rollout(prompt, 0, tokens, logps, np.zeros(n), False, np.zeros(n, np.int32), 0)


def test_sequences_differ_from_their_first_other_token_on():
    base = {n: rollout([1, 2, 3]) for n in range(4)}
    other = {
        0: rollout([1, 2, 3]),
        1: rollout([1, 9, 3], [-1.5, -1, -1]),
        2: rollout([1, 2, 3, 4], [-1, -1, -1.25, -1]),
        3: rollout([1, 2, 3]),
    }
    summary = same_tokens.compare(base, other)
    assert (summary["sequences"], summary["differ"]) == (4, 2)
    # They differ first at positions 1 and 3; the log-probs before differ by 0.5 and 0.25.
    assert summary["first"] == 2.0 and summary["gap"] == pytest.approx(0.375)
    early = same_tokens.compare({0: rollout([1, 2])}, {0: rollout([2, 2])})
    # The position before it is the prompt's, which has no log-prob.
    assert early["first"] == 0 and np.isnan(early["gap"])
    assert same_tokens.compare(base, base)["differ"] == 0


def test_the_cost_of_a_wait_is_what_is_left_over_what_it_was():
    rows = [
        {
            "variant": name,
            "time/rollout_s": 4.0,
            "time/reward_wait_s": wait,
            "step_s": 6.0 + wait,
            "tokens": 9000.0,
        }
        for name, wait in (("+ detokenisation", 3.1), ("+ reward overlap", 0.4), ("no wait", 0.1))
    ]
    assert measures.remaining_wait(rows) == pytest.approx(0.1)
    table = measures.report(rows)
    assert (
        "| + reward overlap | 6.40 | 1.42 | 1.42 | 4.00 | 0.40 | 9.0 |" in table
        and "| no wait | 6.10 | 1.49 |  |" in table
    )


def test_the_slow_verifier_compares_texts(monkeypatch):
    monkeypatch.setattr(slow_verifier, "WAIT_S", 0.0)
    row = {"answer": "12"}
    texts = [f"1 + 11 <answer> {n} </answer>" for n in (12, 1)]
    assert [slow_verifier.wait(row, text) for text in texts] == [1.0, 0.0]
    texts = ["<answer>12</answer>", "12"]
    assert [slow_verifier.at_once(row, text) for text in texts] == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [measures, same_tokens, eight_bit])
def test_a_smoke_run_ends_with_one_line_of_json(benchmark, tmp_path, capsys):
    out = [] if benchmark is same_tokens else ["--out", str(tmp_path / "out")]
    benchmark.main(["--smoke", *out, *(["--rounds", "1"] if benchmark is measures else [])])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["smoke"] and summary["benchmark"] == benchmark.__name__.split(".")[-1]
