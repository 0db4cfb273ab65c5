"""Accuracies of hand-made scores, by value, and of a real tiny model with the real rollout."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from evolve import evolve
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params
from tiny_run import tiny_run

from compass_jax.base.records import Rollout, Score
from compass_jax.commands.options import Show
from compass_jax.commands.show import run_show
from compass_jax.config.data import HELDOUT
from compass_jax.data.prompts import PromptSet
from compass_jax.experience import evaluate as evaluate_module
from compass_jax.experience.evaluate import Evaluation, answers, evaluate
from compass_jax.experience.evaluated import table_rows
from compass_jax.model.params import to_decode
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Sampler

ENGINE = Engine(
    MODEL, COMPUTE, dataclasses.replace(ROLLOUT, max_new_tokens=8, cache_bucket=32), EOS
)
LOOSE = to_decode(random_params())
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 5))]


def rollouts(prompts, samples):
    """Returns `samples` empty responses to each prompt."""
    empty = np.zeros(0, np.float32)
    return [
        [Rollout(p, s, p.tokens, empty, empty, False, empty, 0) for s in range(samples)]
        for p in prompts
    ]


class SpyScorer:
    """A scorer that rewards a response by the sum of its tokens, returns scores in another order,
    and records the submissions.
    """

    def __init__(self):
        self.submissions, self.waiting = {}, []

    def submit(self, key, prompt, response):
        assert key not in self.submissions
        self.submissions[key] = (prompt.id, response())
        self.waiting.append(key)

    def collect(self, block):
        keys, self.waiting = self.waiting[-2:][::-1], self.waiting[:-2]
        return [
            (key, Score(float(sum(map(int, self.submissions[key][1].split())) % 3), True))
            for key in keys
        ]


TOKENIZER = SimpleNamespace(
    decode_response=lambda ids: " ".join(str(int(i)) for i in ids),
    opened_thought=lambda ids: "",
)


def test_every_answer_meets_its_own_score_and_draws_are_evaluations():
    """Scores come back in another order. The same seed gives the same answers, and another seed
    gives others.
    """
    scorer = SpyScorer()
    rollouts, scores = answers(
        ENGINE, LOOSE, PROMPTS, TOKENIZER, scorer, samples=3, sampler=Sampler(1.0), seed=5
    )
    assert [[(r.prompt.id, r.sample) for r in row] for row in rollouts] == [
        [(p.id, s) for s in range(3)] for p in PROMPTS
    ]
    for row, verdicts in zip(rollouts, scores, strict=True):
        for rollout, score in zip(row, verdicts, strict=True):
            assert score.reward == int(rollout.response.sum()) % 3
            assert scorer.submissions[rollout.key] == (
                rollout.prompt.id,
                TOKENIZER.decode_response(rollout.response),
            )

    def texts(**options):
        groups = answers(
            ENGINE,
            LOOSE,
            PROMPTS,
            TOKENIZER,
            SpyScorer(),
            samples=3,
            sampler=Sampler(1.0),
            **options,
        )[0]
        return [TOKENIZER.decode_response(r.response) for row in groups for r in row]

    base = [TOKENIZER.decode_response(r.response) for row in rollouts for r in row]
    assert (
        texts(seed=5) == base
        and np.mean([a == b for a, b in zip(texts(seed=6), base, strict=True)]) < 0.2
    )


def test_accuracies_by_hand(monkeypatch):
    """Four prompts have two labels. An unknown score is in no mean, and a prompt with unknown
    scores alone is in no share.
    """
    right, wrong, half, lost = (
        Score(1.0, True),
        Score(0.0, True),
        Score(0.5, True),
        Score(0.0, False, "timeout"),
    )
    sampled = [
        [right, right, wrong, lost],
        [wrong, half, wrong, wrong],
        [lost, lost, lost, lost],
        [right, wrong, lost, wrong],
    ]
    greedy = [[right], [wrong], [right], [lost]]
    calls = []

    def fake(_engine, _params, prompts, *_, samples, sampler, seed, **options):
        calls.append((samples, sampler, seed))
        return rollouts(prompts, samples), sampled if samples == 4 else greedy

    monkeypatch.setattr(evaluate_module, "answers", fake)
    prompts = [
        dataclasses.replace(p, label=label)
        for p, label in zip(PROMPTS, ("easy", "hard", "hard", "easy"), strict=True)
    ]
    config = evolve(tiny_run(), seed=3, evaluation={"k": 4, "temperature": 0.6, "top_p": 0.9})
    evaluation = evaluate(
        None, None, [PromptSet(HELDOUT, prompts, 4, 0.6)], TOKENIZER, None, config.scored
    )
    assert calls == [(4, Sampler(0.6, 0, 0.9), 3), (1, Sampler(0.0), 3)]
    assert (evaluation.k, evaluation.prompts, evaluation.unscored) == (4, 4, 7)
    assert (
        evaluation.avg_at_k == pytest.approx(3 / 10)
        and evaluation.pass_at_k == pytest.approx(2 / 3)
        and evaluation.greedy == pytest.approx(2 / 3)
    )
    assert evaluation.reward == pytest.approx((3 * 1.0 + 0.5) / 10)
    assert evaluation.labels == {
        "easy": (2, pytest.approx(3 / 6), pytest.approx(1.0)),
        "hard": (2, pytest.approx(0.0), pytest.approx(1 / 2)),
    }
    one = evaluation.sets[HELDOUT]  # known samples 3, 4, 0, 3; of them right 2, 0, 0, 1
    assert one.pass_at == pytest.approx({1: 1 / 3, 2: (1 + 0 + 2 / 3) / 3, 4: 2 / 3})
    residuals = np.array([2, 0, 1]) - 0.3 * np.array([3, 4, 3])
    assert one.avg_at_k_se == pytest.approx(np.sqrt((residuals**2).sum() * 3 / 2) / 10)
    assert one.by["hard"].unscored == 4 and one.by["easy"].greedy == 1.0 and one.unscored == 7
    metrics = evaluation.metrics()
    assert metrics["eval/heldout/reward"] == pytest.approx(0.35)
    assert metrics["eval/heldout/avg_at_k"] == pytest.approx(0.3) and metrics[
        "eval/easy/avg_at_k"
    ] == pytest.approx(0.5)
    assert metrics["eval/heldout/pass_at_k"] == pytest.approx(2 / 3) and metrics[
        "eval/heldout/greedy"
    ] == pytest.approx(2 / 3)


def test_a_label_with_the_name_of_the_held_out_set_does_not_replace_its_accuracy(monkeypatch):
    def fake(engine, params, prompts, *_, samples, **__):
        scores = [[Score(float(i), True)] * samples for i in range(2)]
        return rollouts(prompts, samples), scores

    monkeypatch.setattr(evaluate_module, "answers", fake)
    prompts = [dataclasses.replace(p, label=x) for p, x in zip(PROMPTS, (HELDOUT, "sums"))]
    sets = [PromptSet(HELDOUT, prompts, 3, 1.0)]
    evaluation = evaluate(None, None, sets, TOKENIZER, None, tiny_run().scored)
    assert evaluation.metrics()["eval/heldout/avg_at_k"] == evaluation.avg_at_k == 0.5
    assert evaluation.labels[HELDOUT][1] == 0.0


def test_the_threshold_of_right_is_the_configurations(monkeypatch):
    def fake(engine, params, prompts, *_, samples, **__):
        return rollouts(prompts, samples), [[Score(0.5, True)] * samples] * 2

    monkeypatch.setattr(evaluate_module, "answers", fake)
    config = tiny_run()
    for at, expected in ((1.0, 0.0), (0.5, 1.0)):
        changed = evolve(config, rewards={"right_at": at})
        sets = [PromptSet(HELDOUT, PROMPTS[:2], 3, 1.0)]
        evaluation = evaluate(None, None, sets, TOKENIZER, None, changed.scored)
        assert (evaluation.avg_at_k, evaluation.pass_at_k, evaluation.greedy) == (
            expected,
            expected,
            expected,
        )


def test_greedy_answers_are_the_same_for_every_seed():
    first, second = (
        answers(
            ENGINE,
            LOOSE,
            PROMPTS[::2],
            TOKENIZER,
            SpyScorer(),
            samples=1,
            sampler=Sampler(0.0),
            seed=seed,
        )[0]
        for seed in (0, 9)
    )
    jax.tree.map(
        np.testing.assert_array_equal, [r[0].tokens for r in first], [r[0].tokens for r in second]
    )


class TwiceScorer(SpyScorer):
    """A scorer that accepts a key a second time, for the greedy answers."""

    workers = SimpleNamespace(tried_rows=set())  # no row of these sources can be validated

    def submit(self, key, prompt, response):
        self.submissions.pop(key, None)
        super().submit(key, prompt, response)


def test_answers_and_accuracies_are_written(tmp_path, monkeypatch, capsys):
    config = tiny_run("odd_verifiers:coin")
    evaluation = dataclasses.replace(config.evaluation, k=3)
    config = dataclasses.replace(config, evaluation=evaluation, rollout=ENGINE.config)
    monkeypatch.setattr(evaluate_module, "decoder_of", lambda *_: (ENGINE, LOOSE, TOKENIZER))
    sets = [PromptSet(HELDOUT, PROMPTS[:3], 3, 1.0), PromptSet("own", PROMPTS[3:], 2, 0.5)]
    monkeypatch.setattr(evaluate_module, "evaluation_sets", lambda *_: sets)
    monkeypatch.setattr(
        evaluate_module, "open_scorer", lambda *_: contextlib.nullcontext(TwiceScorer())
    )
    result = evaluate_module.evaluate_weights(config, "w", str(tmp_path / "out"))
    rows = [json.loads(x) for x in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [prompt.question for prompt in PROMPTS]
    assert [(row["set"], row["id"], len(row["samples"])) for row in rows] == [
        *((HELDOUT, prompt.id, 3 + 1) for prompt in PROMPTS[:3]),
        ("own", PROMPTS[3].id, 2 + 1),
    ]
    rewards = np.array([[sample["reward"] for sample in row["samples"]] for row in rows[:3]])
    assert (rewards[:, :3] >= 1).mean() == result.avg_at_k
    assert (rewards[:, 3] >= 1).mean() == result.greedy
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["weights"] == "w" and summary["avg_at_k"] == result.avg_at_k
    own_set = summary["sets"]["own"]
    assert own_set["avg_at_k"] == np.mean([x["reward"] >= 1 for x in rows[3]["samples"][:2]])
    assert (own_set["k"], own_set["temperature"], own_set["prompts"], own_set["avg_at_k_se"]) == (
        2,
        0.5,
        1,
        None,
    )
    mean = rewards[:, :3].mean()
    (row,) = (x for x in table_rows(result.sets[HELDOUT]) if x["task"] == "all")
    assert row["reward"] == pytest.approx(mean) and mean > result.avg_at_k
    monkeypatch.setenv("COLUMNS", "80")  # a terminal that is too narrow for the table
    evaluate_module._show(result, config.rewards, "w")
    output = capsys.readouterr().out
    assert "reward: the mean of the k samples" in output and "…" not in output
    run_show(Show(run=str(tmp_path / "out"), best=True, most=1))
    assert "reward 2" in capsys.readouterr().out


def test_rewards_between_0_and_1_are_said_beside_the_accuracy():
    evaluation = Evaluation(4, 10, 0.0, 0.0, 0.0, 0, reward=0.213, right_at=1.0)
    assert evaluation.line().endswith("greedy 0.000; mean reward 0.213 (right: at least 1)")
    assert "reward" not in Evaluation(4, 10, 0.5, 0.7, 0.4, 0, reward=0.5).line()


def test_samples_without_a_verdict_are_said_beside_the_accuracy():
    """The line counts them for the held-out prompts and for a set, out of k samples and a greedy
    answer for each prompt.
    """
    evaluation = Evaluation(4, 10, 0.5, 0.7, 0.4, 43, reward=0.5)
    assert evaluation.line().endswith("greedy 0.400, 43 of 50 samples have no verdict")
    eval_set = SimpleNamespace(k=2, prompts=3, avg_at_k=0.5, greedy=1.0, unscored=8)
    line = dataclasses.replace(evaluation, unscored=0, sets={"own": eval_set}).line()
    assert line.endswith("0.400; own: avg@2 0.500, greedy 1.000, 8 of 9 samples have no verdict")
