"""One run of a tiny model on maths, multiple choice, calls of tools, code and open questions at
once: each sample is judged by its own source's verifier, and a judge's verdicts outlive a kill.
"""

import dataclasses
import itertools
import json
import shutil

import pytest
from judged import quoted, served, settings
from logged import lines, numbers
from tiny_run import tiny_run

from compass_jax.config import FileSource, LogConfig
from compass_jax.experience.turns import Turns
from compass_jax.training.rl import run_rl

PROGRAM = "```python\ndef f(x):\n    return x + 1\n```"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
# each text is right for one source and wrong for the others
SAID = ("5", "A", CALL, PROGRAM, "Yes, please.", "nonsense")
SOURCES = {
    "math": {"answer": "5", "gold": "A"},
    "choice": {"answer": "A"},
    "tools": {"answer": [{"name": "f", "arguments": {"a": 1}}]},
    "code": {"tests": ["assert f(1) == 2"]},
    "judge": {"answer": "No."},
}


def text(_, rollout):
    """Returns a sample's text, which does not depend on its tokens: the first sample is right for
    its source, the others are for other sources. The text of an answer to an open question changes
    with each visit.
    """
    suffix = "!" * rollout.prompt.visit if rollout.prompt.label == "judge" else ""
    first = list(SOURCES).index(rollout.prompt.label)
    return SAID[(first + rollout.sample) % len(SAID)] + suffix


def say(number, body):
    """Returns the judge's verdict: polite answers are better, and the verdict on other answers
    changes with the request's number.
    """
    content = body["messages"][1]["content"]
    if "nonsense" in content:
        return "I cannot say."
    for name, word in (("Candidate", "Better"), ("Anchor", "Worse")):
        if "please" in quoted(content, name):
            return word
    return ("Better", "Worse", "Tie", "Tie", "Worse", "Better", "Worse")[number % 7]


def mixed(folder, endpoint):
    sources = []
    for name, columns in SOURCES.items():
        file = folder / f"{name}.jsonl"
        file.write_text(json.dumps({"prompt": f"{name}?", **columns}) + "\n")
        gold = "exact" if "gold" in columns else ""
        field = "answer" if "answer" in columns else ""
        sources.append(
            FileSource(str(file), answer_field=field, label=name, verifier=name, gold=gold)
        )
    base = tiny_run()
    return dataclasses.replace(
        base,
        run_dir=str(folder / "run"),
        seed=4,  # with this seed both steps have an open question
        data=dataclasses.replace(
            base.data, sources=tuple(sources), heldout_frac=0.0, eval_prompts=0
        ),
        rewards=dataclasses.replace(base.rewards, judge=settings(endpoint, requests=1)),
        log=LogConfig(groups=len(SOURCES), tokens=0),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns (folder, requests) of a run, and of the same command after a kill in its second step,
    before that step's checkpoint.
    """
    folder = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch, served(say) as (endpoint, seen):
        patch.setattr(Turns, "text", text)
        config, results = mixed(folder, endpoint), []
        for _ in range(2):
            run_rl(config)
            results.append((folder / f"after{len(results)}", list(seen.requests)))
            shutil.copytree(folder / "run", results[-1][0])
            shutil.rmtree(folder / "run" / "checkpoints" / "step_00000002")
            seen.requests.clear()
    return results


def test_each_sample_is_judged_by_its_own_sources_verifier(runs):
    directory, _ = runs[0]
    groups = lines(directory, "rollouts")
    assert {x["label"] for x in groups} == set(SOURCES) and len(groups) == 8
    for group in groups:
        known = [x["outcome"] == "ok" for x in group["samples"]]
        rewards = [x["reward"] for x in group["samples"]]
        if group["label"] == "judge":
            assert known == [True, False, True, True] and rewards[0] == 1
            assert set(rewards[2:]) <= {0, 0.5, 1}
        else:
            assert all(known) and rewards == [1, 0, 0, 0]


def test_the_metrics_account_for_the_judge_and_for_gold_labels(runs):
    groups = lines(runs[0][0], "rollouts")
    for row, four in zip(numbers(runs[0][0]), (groups[:4], groups[4:]), strict=True):
        labels = [group["label"] for group in four]
        judged = labels.count("judge")
        assert row["reward/unknown_frac"] == pytest.approx(judged / 16)
        if judged:
            assert row["reward/judge_unparsable/mean"] == pytest.approx(1 / 4)
            assert row["reward/judge_unreachable/mean"] == 0
        # gold: "A" is right; of its three pairs that with "5", which maths found right, is inverted
        assert row["advantage/inversion_frac"] == pytest.approx(("math" in labels) / 3)
        of_label = [row[name] for name in row if name.endswith("/inversion_frac")]
        assert of_label == pytest.approx([1 / 3] * (1 + ("math" in labels)))


def test_a_killed_run_repeats_its_step_with_the_verdicts_that_were_known(runs):
    (before, first), (after, second) = runs
    assert numbers(before) == numbers(after)
    for a, b in itertools.zip_longest(lines(before, "rollouts"), lines(after, "rollouts")):
        assert a == b
    assert len(first) == 2 * 4 * 2, "four answers in each step, in two orders"
    assert len(second) == 2 and all("nonsense" in str(x["messages"]) for x in second)
