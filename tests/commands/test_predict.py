"""`compass data --predict` shows the prompts by their predicted pass rates, from outcomes that a
filter or a run has measured.
"""

import dataclasses
import json
import re

import numpy as np
import pytest
from tiny_run import tiny_run

from compass_jax.commands.predict import outcomes, run_predict
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.data.files import DataError
from compass_jax.data.keep import PassRate
from compass_jax.data.predictors.label import Label
from compass_jax.data.predictors.state import State
from compass_jax.data.predictors.text import Text
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import load_tokenizer

HARD = "What is {} times {}, written in words and backwards?"
EASY = "Repeat the number {} and then {}."


@pytest.fixture
def config(tmp_path):
    """80 prompts in one file, every other one hard."""
    rows = [
        {"prompt": (HARD if n % 2 else EASY).format(7 * n + 11, 3 * n), "answer": str(n)}
        for n in range(80)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_run("odd_verifiers:coin")
    sources = (FileSource(str(tmp_path / "rows.jsonl")),)
    tokenizer = config.data.tokenizer
    data = DataConfig(sources, tokenizer=tokenizer, heldout_frac=0.0, eval_prompts=0)
    rl = dataclasses.replace(config.rl, predictor=Text())
    return dataclasses.replace(config, data=data, rl=rl, rewards=RewardConfig())


def prompts_of(config):
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    return train_prompts(config.data, tokenizer, config.seed, lambda _: None)


def written_run(tmp_path, prompts, right_of_easy=3):
    """Writes the groups of a run: easy prompts are mostly right, hard ones never."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = []
    for step, prompt in enumerate(prompts, 1):
        right = right_of_easy if prompt.question.startswith("Repeat") else 0
        samples = [{"response": "x", "reward": float(i < right)} for i in range(4)]
        row = {"stage": "rl", "step": step, "prompt": prompt.question, "samples": samples}
        lines.append(json.dumps(row) + "\n")
    (folder / "rollouts.jsonl").write_text("".join(lines))
    return str(folder)


def looked(config, path, most=2):
    lines = []
    run_predict(config, path, most, lines.append)
    return "\n".join(lines)


def test_prompts_that_no_run_sampled_are_told_apart_by_their_text(config, tmp_path):
    prompts = prompts_of(config)
    text = looked(config, written_run(tmp_path, prompts[:24]))
    assert "predicted by text, from 96 answers to 24 of 80 prompts" in text
    by_prompt, by_all = map(float, re.findall(r"(?:log loss|for all) ([\d.]+)", text))
    # a mean of 0.75 and 0 each: 0.28 nats if they are told apart, 0.66 if not
    assert by_prompt < 0.4 < by_all and "tells prompts apart" in text
    counts = [int(x) for x in re.findall(r"^ +\d+ to +\d+% +(\d+)", text, re.MULTILINE)]
    assert sum(counts) == 80 and counts[0] >= 35 and sum(counts[5:]) >= 35
    parts = (text.split(f"{name}:\n")[1] for name in ("lowest", "highest"))
    lowest, highest = (part.splitlines()[:2] for part in parts)
    assert all("backwards" in line for line in lowest)
    assert all("Repeat" in line for line in highest)


def test_a_predictor_that_cannot_tell_them_apart_says_so(config, tmp_path):
    rl = dataclasses.replace(config.rl, predictor=Label())
    path = written_run(tmp_path, prompts_of(config)[:24])
    text = looked(dataclasses.replace(config, rl=rl), path, most=0)
    assert "predicted by label" in text and "tells nothing about new prompts" in text
    assert "lowest" not in text


def test_a_filters_pass_rates_count_as_a_runs_answers_do(config, tmp_path):
    prompts = prompts_of(config)[:12]
    file = tmp_path / "pass_rates.jsonl"
    rows = [
        PassRate(p.id, p.label, p.question, 0.75 * (p.question[0] == "R"), 4, 4, 9, 0.1, 0.9, True)
        for p in prompts
    ]
    file.write_text("".join(json.dumps(row._asdict()) + "\n" for row in rows))
    both = [
        outcomes(path, prompts_of(config), config.rewards)
        for path in (str(file), written_run(tmp_path, prompts))
    ]
    assert [p.question for p in both[0].prompts] == [p.question for p in both[1].prompts]
    np.testing.assert_array_equal(both[0].right, both[1].right)
    np.testing.assert_array_equal(both[0].judged, 4)


def test_rewards_count_on_the_scale_of_the_verdicts_and_those_without_a_verdict_do_not(
    config, tmp_path
):
    prompt = prompts_of(config)[0]
    samples = [
        {"response": "a", "reward": 1.0},
        {"response": "b", "reward": -1.0},
        {"response": "c", "reward": 0.0, "outcome": "timeout"},
        {"response": "d", "reward": 9.0},
    ]
    row = {"stage": "rl", "step": 1, "prompt": prompt.question, "samples": samples}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    seen = outcomes(str(tmp_path), [prompt], RewardConfig(wrong_at=-1.0, right_at=1.0))
    assert (seen.right.tolist(), seen.judged.tolist()) == ([2.0], [3.0])


def test_outcomes_of_other_data_and_a_predictor_that_needs_the_policy_are_refused(config, tmp_path):
    path = written_run(tmp_path, prompts_of(config)[:3])
    (tmp_path / "run" / "rollouts.jsonl").write_text(
        json.dumps({"stage": "rl", "step": 1, "prompt": "?", "samples": []}) + "\n"
    )
    with pytest.raises(DataError, match="no judged answer to a training prompt"):
        run_predict(config, path, 1)
    rl = dataclasses.replace(config.rl, predictor=State())
    with pytest.raises(DataError, match=r"--rl\.predictor text"):
        run_predict(dataclasses.replace(config, rl=rl), path, 1)
