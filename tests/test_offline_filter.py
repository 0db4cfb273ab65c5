"""compass filter on a real tiny model: rates by value, what is kept, continued after a kill, read
by RL.
"""

import dataclasses
import json
import os

import numpy as np
import pytest
from tiny_run import tiny_run

from compass_jax import offline_filter
from compass_jax.config import ConfigError
from compass_jax.data.files import DataError
from compass_jax.data.keep import PassRate, kept_prompts, read_pass_rates
from compass_jax.data.prompts import train_prompts
from compass_jax.offline_filter import expected_uniform, run_filter, suggest_group_size, summarise
from compass_jax.records import Score
from compass_jax.rundir import RunDirectoryGone, RunDirectoryInUse
from compass_jax.train.loop import run_rl
from compass_jax.train.session import load_tokenizer
from compass_jax.train.sft import run_sft

pytestmark = pytest.mark.usefixtures("compile_lightly")


class Verdicts:
    """Prompt n of those it meets: always right, always wrong, right for even samples, no verdict,
    in turn.
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
        taken, self.waiting = self.waiting, []
        return taken


@pytest.fixture(scope="module")
def trained(tmp_path_factory, compile_lightly):
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


# pass rate, kept; without a verdict a prompt stays
EXPECTED = {0: (1.0, False), 1: (0.0, False), 2: (0.5, True), 3: (0.0, True)}


def test_rates_what_is_kept_the_picture_and_the_account(trained, tmp_path, verdicts):
    summary = run_filter(trained, trained.run_dir, str(tmp_path), samples=4)
    prompts = train_prompts(trained.data, load_tokenizer(trained), trained.seed)
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
    assert (tmp_path / "histogram.png").stat().st_size > 5000
    kept, tokens = kept_prompts(prompts, str(tmp_path / "pass_rates.jsonl"))
    assert [p.id for p in kept] == [p.id for p in prompts if p.id % 4 > 1] and tokens == summary[
        "tokens"
    ]


def _ints(pairs):
    return {int(k) if k.isdigit() else k: v for k, v in pairs.items()}


def test_a_killed_filter_continues_and_other_settings_are_refused(
    trained, tmp_path, verdicts, monkeypatch
):
    run_filter(trained, trained.run_dir, str(tmp_path / "whole"), samples=4)
    run_filter(trained, trained.run_dir, str(tmp_path / "cut"), samples=4)
    path = tmp_path / "cut" / "pass_rates.jsonl"
    text = path.read_text()
    half = text.splitlines(keepends=True)[:9]
    path.write_text("".join(half) + '{"id": 12, "la')
    asked = []
    real = offline_filter.answers

    def spying(engine, params, prompts, *args, **options):
        asked.extend(prompts)
        return real(engine, params, prompts, *args, **options)

    monkeypatch.setattr(offline_filter, "answers", spying)
    run_filter(trained, trained.run_dir, str(tmp_path / "cut"), samples=4)
    assert path.read_text() == text and len(asked) == len(text.splitlines()) - 9
    with pytest.raises(ConfigError, match=r"was begun with --samples 4 --low 0\.0 --high 1\.0"):
        run_filter(trained, trained.run_dir, str(tmp_path / "cut"), samples=8)


def test_a_second_filter_on_one_folder_is_refused_and_a_removed_folder_is_missed(
    trained, tmp_path, verdicts, monkeypatch
):
    out = tmp_path / "out"
    real = offline_filter.answers

    def beside(*args, **options):
        with pytest.raises(RunDirectoryInUse, match=f"{out} is in use by process {os.getpid()}"):
            run_filter(trained, trained.run_dir, str(out), samples=2)
        out.rename(tmp_path / "moved")
        return real(*args, **options)

    monkeypatch.setattr(offline_filter, "answers", beside)
    with pytest.raises(RunDirectoryGone, match="was removed or replaced"):
        run_filter(trained, trained.run_dir, str(out), samples=2)
    assert not out.exists()


def test_rl_trains_on_what_is_kept_and_reports_what_the_filter_cost(trained, tmp_path, verdicts):
    summary = run_filter(trained, trained.run_dir, str(tmp_path), samples=2)
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
    asked = {
        json.loads(line)["prompt"]
        for line in (tmp_path / "rl" / "rollouts.jsonl").read_text().splitlines()
    }
    kept = {
        row.question for row in read_pass_rates(tmp_path / "pass_rates.jsonl").values() if row.keep
    }
    assert len(asked) > 4 and asked <= kept


def rate(number, p, known=4, keep=True):
    return PassRate(number, "x", f"q{number}", p, known, 4, 10, 0.0, 1.0, keep)


def test_expected_uniform_groups_by_hand():
    found = summarise([rate(1, 0.5), rate(2, 1.0, keep=False), rate(3, 0.0, known=0)], 4)
    assert found["expected_uniform"][2] == pytest.approx((0.5 + 1) / 2) and found[
        "expected_uniform"
    ][8] == pytest.approx((2 * 0.5**8 + 1) / 2)
    assert (found["prompts"], found["kept"], found["without_verdict"], found["tokens"]) == (
        3,
        2,
        1,
        30,
    )


def test_files_that_cannot_be_used(tmp_path, trained):
    prompts = train_prompts(trained.data, load_tokenizer(trained), trained.seed)
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
            run_filter(trained, trained.run_dir, str(tmp_path), **options)


def test_the_suggested_group_size_is_the_smallest_with_few_uniform_groups_where_prompts_can_vary():
    """p = 0.5 alone: 2 * 0.5^n <= 0.1 from n = 5 on. p = 0.9 alone: 0.9^n + 0.1^n <= 0.1 from n =
    22. Always right or wrong counts for nothing.
    """
    assert (
        suggest_group_size(np.array([0.5])) == 5
        and suggest_group_size(np.array([0.9, 0.0, 1.0, 1.0])) == 22
    )
    for n, expected in ((4, 0.125), (5, 0.0625)):
        assert expected_uniform(np.array([0.5]), n) == pytest.approx(expected)
    assert (
        suggest_group_size(np.array([0.999])) == 64
        and suggest_group_size(np.array([0.0, 1.0])) is None
    )
    assert summarise([rate(1, 0.5), rate(2, 1.0, keep=False)], 4)["suggested_group_size"] == 5
