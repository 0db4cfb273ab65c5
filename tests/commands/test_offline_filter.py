"""compass filter on a real tiny model: the pass rates, the prompts that are kept, a resume after a
kill, and RL on the kept prompts.
"""

import dataclasses
import json
import os
import re

import numpy as np
import pytest
from tiny_run import tiny_run

from compass_jax.apps.pipeline import offline_filter
from compass_jax.apps.pipeline.offline_filter import Bounds, run_filter, summarise
from compass_jax.base.records import Score
from compass_jax.config import ConfigError
from compass_jax.data.files import DataError
from compass_jax.data.keep import PassRate, kept_prompts, read_pass_rates
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.runs.rundir import RunDirectoryGone, RunDirectoryInUse
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft


class Verdicts:
    """A scorer that decides by the prompt's id: always right, always wrong, right for even samples,
    or no verdict.
    """

    def __init__(self, *_):
        self.waiting, self.turn = [], {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, key, prompt, text):
        kind = prompt.id % 4
        count = self.turn[prompt.id] = self.turn.get(prompt.id, -1) + 1
        reward = {0: 1.0, 1: 0.0, 2: float(count % 2 == 0), 3: 0.0}[kind]
        self.waiting.append((key, Score(reward, kind != 3)))

    def collect(self, block):
        scores, self.waiting = self.waiting, []
        return scores


def filtered(config, out, **options):
    return run_filter(config.policy, config.scored, config.run_dir, out, Bounds(**options))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny_run()
    config = dataclasses.replace(
        config,
        run_dir=str(tmp_path_factory.mktemp("filter") / "sft"),
        sft=dataclasses.replace(config.sft, steps=1),
    )
    run_sft(config)
    return config


@pytest.fixture
def verdicts(monkeypatch):
    monkeypatch.setattr(offline_filter, "open_scorer", Verdicts)


# (pass rate, whether the prompt is kept); a prompt without a verdict is kept
EXPECTED = {0: (1.0, False), 1: (0.0, False), 2: (0.5, True), 3: (0.0, True)}


def test_rates_what_is_kept_the_picture_and_the_account(trained, tmp_path, verdicts):
    summary = filtered(trained, str(tmp_path), samples=4)
    prompts = train_prompts(
        trained.data, load_tokenizer(trained.data, trained.model.vocab_size), trained.seed
    )
    rows = read_pass_rates(tmp_path / "pass_rates.jsonl")
    assert list(rows) == [p.id for p in prompts] and len(prompts) > 20
    for prompt in prompts:
        row = rows[prompt.id]
        assert (row.pass_rate, row.keep) == EXPECTED[prompt.id % 4] and row.known == (
            0 if prompt.id % 4 == 3 else 4
        )
        assert row.question == prompt.question and 4 <= row.tokens <= 4 * 16
    kinds = np.bincount([p.id % 4 for p in prompts], minlength=4)
    assert (summary["always_right"], summary["always_wrong"], summary["without_verdict"]) == tuple(
        kinds[[0, 1, 3]]
    )
    assert summary["kept"] == kinds[2] + kinds[3] and summary["tokens"] == sum(
        row.tokens for row in rows.values()
    )
    assert summary == json.loads((tmp_path / "summary.json").read_text(), object_hook=_ints)
    remaining, tokens, measured = kept_prompts(prompts, str(tmp_path / "pass_rates.jsonl"))
    expected = {2: (2, 4), 3: (0, 0)}  # right and known answers
    assert [(m.prompt.id, m.right, m.known) for m in measured] == [
        (p.id, *expected[p.id % 4]) for p in remaining
    ]
    assert [p.id for p in remaining] == [
        p.id for p in prompts if p.id % 4 > 1
    ] and tokens == summary["tokens"]


def _ints(pairs):
    return {int(k) if k.isdigit() else k: v for k, v in pairs.items()}


def test_a_killed_filter_continues_and_other_settings_are_refused(
    trained, tmp_path, verdicts, monkeypatch
):
    filtered(trained, str(tmp_path / "whole"), samples=4)
    filtered(trained, str(tmp_path / "cut"), samples=4)
    path = tmp_path / "cut" / "pass_rates.jsonl"
    text = path.read_text()
    half = text.splitlines(keepends=True)[:9]
    path.write_text("".join(half) + '{"id": 12, "la')
    sampled = []
    real = offline_filter.answers

    def spying(engine, params, prompts, *args, **options):
        sampled.extend(prompts)
        return real(engine, params, prompts, *args, **options)

    monkeypatch.setattr(offline_filter, "answers", spying)
    filtered(trained, str(tmp_path / "cut"), samples=4)
    assert path.read_text() == text and len(sampled) == len(text.splitlines()) - 9
    with pytest.raises(ConfigError, match=r"was begun with --samples 4 --low 0\.0 --high 1\.0"):
        filtered(trained, str(tmp_path / "cut"), samples=8)


def test_a_second_filter_on_one_folder_is_refused_and_a_removed_folder_is_missed(
    trained, tmp_path, verdicts, monkeypatch
):
    out = tmp_path / "out"
    real = offline_filter.answers

    def start_second(*args, **options):
        with pytest.raises(RunDirectoryInUse, match=f"{out} is in use by process {os.getpid()}"):
            filtered(trained, str(out), samples=2)
        out.rename(tmp_path / "moved")
        return real(*args, **options)

    monkeypatch.setattr(offline_filter, "answers", start_second)
    with pytest.raises(RunDirectoryGone, match="was removed or replaced"):
        filtered(trained, str(out), samples=2)
    assert not out.exists()


def test_rl_trains_on_what_is_kept_and_reports_what_the_filter_cost(trained, tmp_path, verdicts):
    summary = filtered(trained, str(tmp_path), samples=2)
    data = dataclasses.replace(
        trained.data, keep_file=str(tmp_path / "pass_rates.jsonl"), eval_prompts=0
    )
    config = dataclasses.replace(
        trained, run_dir=str(tmp_path / "rl"), data=data, init_from=trained.run_dir
    )
    run_rl(dataclasses.replace(config, rl=dataclasses.replace(config.rl, steps=2)))
    metrics = [
        json.loads(line)["metrics"]
        for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [m["waste/filter_tokens"] for m in metrics] == [summary["tokens"]] * 2
    trained_questions = {
        json.loads(line)["prompt"]
        for line in (tmp_path / "rl" / "rollouts.jsonl").read_text().splitlines()
    }
    kept_questions = {
        row.question for row in read_pass_rates(tmp_path / "pass_rates.jsonl").values() if row.keep
    }
    assert len(trained_questions) > 4 and trained_questions <= kept_questions


def rate(number, p, known=4, keep=True):
    return PassRate(number, "x", f"q{number}", p, known, 4, 10, 0.0, 1.0, keep)


def test_what_is_advised_is_of_the_kept_prompts_and_says_how_sure_it_is():
    """The groups of ten prompts with a rate of 1/2 are uniform with the chance 2 * 0.5^n, which is
    1 in 16 for five samples. Prompts at 0 and 1 are not kept and do not change the advice.
    """
    even = [rate(n, 0.5, known=200)._replace(samples=200) for n in range(10)]
    ends = [rate(n, float(n % 2), known=200, keep=False) for n in range(10, 30)]
    summary = summarise([*even, *ends], 200)
    shares = summary["expected_uniform"]
    assert summary["suggested_group_size"] == 5 and list(shares) == [2, 4, 5, 8, 16, 32, 64]
    for n, share in shares.items():
        assert share["mean"] == pytest.approx(2 * 0.5**n, rel=0.1, abs=1e-3)
        assert 0 <= share["low"] <= share["mean"] + 0.05 and share["low"] <= share["high"]
    assert offline_filter._advice(summary) == (
        "suggested rl.group_size: 5 (about 6% of the kept prompts' groups come out uniform (0% to"
        " 20% in 9 of 10 cases))"
    )
    summary = summarise([rate(1, 0.5), rate(2, 1.0, keep=False), rate(3, 0.0, known=0)], 4)
    assert (summary["prompts"], summary["kept"], summary["without_verdict"], summary["tokens"]) == (
        3,
        2,
        1,
        30,
    )


def test_where_no_group_size_does_it_the_advice_says_so():
    """The prompts have a rate of 1/200, so that three quarters of groups of 64 are uniform."""
    rare = [rate(n, 0.005, known=200)._replace(samples=200) for n in range(50)]
    summary = summarise(rare, 200)
    assert summary["suggested_group_size"] is None
    assert summary["expected_uniform"][64]["mean"] == pytest.approx(0.995**64, abs=0.1)
    advice = offline_filter._advice(summary)
    assert re.match(r"no rl\.group_size up to 64 makes 10% or less .*: at 64 about [67]\d%", advice)
    empty = summarise([rate(1, 1.0, keep=False)], 4)
    assert empty["suggested_group_size"] is None and empty["expected_uniform"] == {}


def test_files_that_cannot_be_used(tmp_path, trained):
    prompts = train_prompts(
        trained.data, load_tokenizer(trained.data, trained.model.vocab_size), trained.seed
    )
    path = tmp_path / "pass_rates.jsonl"
    with pytest.raises(DataError, match="no such file; compass filter writes it"):
        kept_prompts(prompts, str(path))
    rates = [rate(p.id, 1.0, keep=False)._replace(question=p.question) for p in prompts]
    good = "".join(json.dumps(row._asdict()) + "\n" for row in rates)
    for content, message in (
        (good, rf"keeps none of {len(prompts)} training prompts"),
        (good[:-3], "the last line is cut off"),
        ('{"id": 1}\n', "line 1: not a line of compass filter"),
        (
            "\n".join(good.splitlines()[1:]) + "\n",
            rf"no pass rate for 1 of {len(prompts)} training prompts",
        ),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            kept_prompts(prompts, str(path))
    for options, message in (
        ({"samples": 1}, "--samples 1"),
        ({"low": 0.5, "high": 0.5}, "--low 0.5 --high 0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            filtered(trained, str(tmp_path), **options)
