"""Comparisons of two evaluations: values against numpy references, and refusals of evaluations that
cannot be compared.
"""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from compass_jax.commands import cli
from compass_jax.experience.paired import averages, compare, greedies, read_evaluation
from compass_jax.runs.report import ReportError

SETTINGS = {"top_k": 0, "top_p": 1.0, "max_new_tokens": 8, "right_at": 1.0}


def sample(right):
    outcome = "ok" if right is not None else "timeout"
    return {"response": "", "reward": float(right or 0), "outcome": outcome, "tokens": 1}


def write(folder, answers, k=2, temperature=1.0, settings=SETTINGS):
    """Writes an evaluation's files. answers: {set: {id: (samples..., greedy)}}, each a reward or
    None.
    """
    folder.mkdir(parents=True)
    rows = [
        {"set": name, "id": id, "prompt": f"question {id}", "samples": [sample(x) for x in rewards]}
        for name, prompts in answers.items()
        for id, rewards in prompts.items()
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {name: {"k": k, "temperature": temperature} for name in answers}
    (folder / "summary.json").write_text(json.dumps({"settings": settings, "sets": sets}))
    return str(folder)


def test_averages_are_paired_by_prompt():
    """The p-value is that of the t statistic by its formula, with unequal counts and a prompt of
    unknown scores.
    """
    rng = np.random.default_rng(0)
    counts = [((int(rng.integers(0, n + 1)), n), (int(rng.integers(0, 5)), 4))
              for n in (4, 4, 3, 2, 4, 4, 1, 4, 4, 4)]  # fmt: skip
    result = averages([*counts, ((0, 0), (3, 4))])
    gains = np.array([b / m - a / n for (a, n), (b, m) in counts])
    t = gains.mean() / (gains.std(ddof=1) / math.sqrt(len(gains)))
    assert result["prompts"] == 10 and result["difference"] == pytest.approx(gains.mean())
    assert result["p"] == pytest.approx(2 * stats.t.sf(abs(t), len(gains) - 1))
    draws = np.random.default_rng(1).choice(gains, (20_000, len(gains))).mean(1)
    assert result["interval"] == pytest.approx(np.percentile(draws, (2.5, 97.5)), abs=0.02)
    assert result["second"] - result["first"] == pytest.approx(result["difference"])


def test_greedy_answers_are_tested_on_the_prompts_that_one_side_alone_gets_right():
    pairs = [(True, True)] * 5 + [(False, True)] * 6 + [(True, False)] + [(None, True)] * 3
    result = greedies(pairs)
    flips = [sum(x) for x in itertools.product((0, 1), repeat=7)]
    assert result["p"] == pytest.approx(np.mean([abs(2 * x - 7) >= 5 for x in flips]))
    assert result["prompts"] == 12 and result["difference"] == pytest.approx(5 / 12)
    assert result["interval"][0] < 5 / 12 < result["interval"][1]


def test_equal_sides_have_p_1_and_nothing_known_has_none():
    equal = averages([((1, 2), (2, 4)), ((0, 2), (0, 4))])
    assert (equal["difference"], equal["p"]) == (0, 1) and equal["interval"][0] < 0
    assert greedies([(True, True)])["p"] == 1
    assert averages([((0, 2), (2, 2))] * 3)["p"] == pytest.approx(2 / 2**3)  # no variance: by sign
    for result in (averages([((0, 0), (1, 2))]), greedies([(None, None)])):
        assert result["prompts"] == 0 and result["p"] is result["difference"] is None


def test_folders_are_matched_by_set_and_prompt(tmp_path, capsys):
    answers = {"x": {1: (1, 0, 1), 2: (0, 0, 0), 3: (1, 1, 1)}, "y": {1: (0,) * 3}}
    other_answers = {"x": {2: (1, 1, 1), 3: (1, None, 0), 4: (0, 0, 0)}, "z": {1: (1,) * 3}}
    first = write(tmp_path / "a", answers)
    write(tmp_path / "run" / "evaluation", other_answers)
    run = str(tmp_path / "run")  # a training run's directory
    comparison = compare(read_evaluation(first), read_evaluation(run))
    one = comparison["sets"]["x"]
    assert (one["matched"], one["only_first"], one["only_second"]) == (2, 1, 1)
    assert (one["avg_at_k"]["first"], one["avg_at_k"]["second"]) == (0.5, 1.0)
    assert (one["greedy"]["first"], one["greedy"]["second"]) == (0.5, 0.5)
    assert comparison["only"] == {"y": first, "z": run} and list(comparison["sets"]) == ["x"]
    assert cli.main(["compare", first, run]) == 0
    output = capsys.readouterr().out
    assert "x: 2 prompts in both" in output and "+0.500" in output
    assert f"the set y is in {first} alone" in output
    assert f"1 prompts of x are in {first} alone" in output
    assert cli.main(["compare", first, run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == comparison


def test_rewards_that_are_neither_right_nor_wrong_are_compared(tmp_path, capsys):
    """The prompts' means are 0.5 and 0.25, then 0.5 and 0.75; none of the answers is right."""
    sides = ({1: (0.25, 0.75, 0), 2: (0.25, 0.25, 0)}, {1: (0.5, None, 0), 2: (0.75, 0.75, 0)})
    first, second = (write(tmp_path / str(i), {"x": one}) for i, one in enumerate(sides))
    comparison = compare(read_evaluation(first), read_evaluation(second))["sets"]["x"]
    assert comparison["avg_at_k"]["first"] == comparison["avg_at_k"]["second"] == 0
    reward = comparison["reward"]
    assert (reward["prompts"], reward["first"], reward["second"]) == (2, 0.375, 0.625)
    assert reward["difference"] == 0.25
    assert cli.main(["compare", first, second]) == 0
    (row,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("│ reward"))
    assert "0.375" in row and "+0.250" in row


@pytest.mark.parametrize("scale", [1.0, -60.0, 12_345.0])
@pytest.mark.parametrize("known", [True, False])
def test_the_table_fits_80_columns(tmp_path, capsys, scale, known):
    """Also with large rewards, with many samples, and where nothing is known."""
    rng = np.random.default_rng(0)
    drawn = scale * rng.random((2, 30, 17)) if known else np.full((2, 30, 17), None)
    sides = ({n: tuple(row) for n, row in enumerate(side.tolist())} for side in drawn)
    first, second = (write(tmp_path / str(i), {"heldout": x}, k=16) for i, x in enumerate(sides))
    assert cli.main(["compare", first, second]) == 0
    _, *table = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in table) and len(table) > 6
    (row,) = (line for line in table if line.startswith("│ avg@16"))
    assert row.count("│") == 8
    assert "p: avg@k and reward by paired t; greedy by McNemar's, exact" in table


def test_rewards_beyond_1_have_an_interval_too():
    one, equal = averages([((-4.0, 2), (6.0, 2))]), averages([((-6.0, 2), (8.0, 2))] * 3)
    assert one["interval"] == [-5.0, 5.0] and one["difference"] == 5
    low, high = equal["interval"]
    assert equal["difference"] == 7 and -7 <= low < 7 and high == pytest.approx(7)


def test_what_cannot_be_compared_is_refused_by_name(tmp_path, capsys):
    base = write(tmp_path / "a", {"x": {1: (1, 0, 1)}})
    cases = {
        "b": (dict(answers={"y": {1: (1, 0, 1)}}), r"no prompt is in both .*\(x\) and .*\(y\)"),
        "c": (dict(answers={"x": {7: (1, 0, 1)}}), "no prompt is in both"),
        "d": (dict(answers={"x": {1: (1, 0, 1, 1)}}, k=3), "x: k = 2 and 3"),
        "e": (dict(answers={"x": {1: (1, 0, 1)}}, temperature=0.6), "x: temperature = 1.0 and 0.6"),
        "f": (dict(answers={"x": {1: (1, 0, 1)}}, settings=SETTINGS | {"top_p": 0.9}),
              "top_p = 1.0 and 0.9"),
    }  # fmt: skip
    for name, (options, message) in cases.items():
        with pytest.raises(ReportError, match=message):
            compare(read_evaluation(base), read_evaluation(write(tmp_path / name, **options)))
        assert cli.main(["compare", base, str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("compass compare: ") == len(cases)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", '{"avg_at_k": 0.5}', "summary.json: no summary of an evaluation with"),
        ("summary.json", '{"sets": ', "summary.json"),
        ("answers.jsonl", '{"prompt": "q", "samples": []}\n', "answers.jsonl, line 1: no answers"),
        ("answers.jsonl", '{"set": "x", "id": 1, "prompt": "q", "sam', "answers.jsonl, line 1"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, message):
    folder = write(tmp_path / "a", {"x": {1: (1, 0, 1)}})
    (tmp_path / "a" / file).write_text(text)
    with pytest.raises(ReportError, match=message):
        read_evaluation(folder)
    with pytest.raises(ReportError, match=r"there is no answers\.jsonl; name a folder"):
        read_evaluation(str(tmp_path / "none"))
    answers = json.dumps({"set": "x", "id": 1, "prompt": "q", "samples": [sample(1)] * 2})
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "answers.jsonl").write_text(answers + "\n")
    (tmp_path / "short" / "summary.json").write_text(
        json.dumps({"settings": SETTINGS, "sets": {"x": {"k": 2, "temperature": 1.0}}})
    )
    with pytest.raises(ReportError, match=r"line 1: .*1 samples, and k = 2"):
        read_evaluation(str(tmp_path / "short"))
