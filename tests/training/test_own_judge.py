"""The judge in the package's engine, with the policy's current weights or a checkpoint's."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from tiny import random_params
from tiny_run import tiny_run

from compass_jax.base.records import Prompt, Rollout, stable_id
from compass_jax.config import ConfigError, EngineJudgeConfig, FileSource, LogConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rewards.judges import judging
from compass_jax.rewards.judges.endpoint import REFUSED
from compass_jax.rollout.engine import Engine
from compass_jax.training.own_judge import OwnJudge, rollout_of
from compass_jax.training.rl import run_rl
from compass_jax.weights.hf import save_params
from compass_jax.weights.sync import sync_weights

JUDGE = EngineJudgeConfig(prompt_buckets=(32,), max_tokens=8, slots=2)
QUESTIONS = [[{"role": "user", "content": text}] for text in ("a", "b" * 40, "c", "a b", "d")]


def judge_of(seed):
    base = tiny_run()
    tokenizer = Tokenizer.for_model(base.data.tokenizer, base.model.vocab_size)
    rollout = rollout_of(JUDGE, dataclasses.replace(base.rollout, cache_bucket=40))
    engine = Engine(base.model, base.compute, rollout, tokenizer.eos_id)
    params = random_params(base.model, seed=seed)
    decode, _ = sync_weights(params, base.model, "float32", "off", layout=engine.layout)
    return OwnJudge(engine, decode, tokenizer, seed=0)


@pytest.fixture(scope="module")
def judge():
    return judge_of(0)


def test_each_question_gets_its_own_answer_whatever_was_asked_beside_it(judge):
    together = judge(QUESTIONS)
    assert [x.failure for x in together] == ["", REFUSED, "", "", ""]
    assert "prompt_buckets" in together[1].detail
    backwards = judge(QUESTIONS[::-1])[::-1]
    assert backwards == together
    alone = [judge([question])[0] for question in QUESTIONS]
    assert alone == together and len({x.text for x in together}) == 5
    assert judge([]) == []


def test_a_verdicts_entropy_is_the_largest_of_its_last_line(judge):
    tokenizer = Tokenizer.load(tiny_run().data.tokenizer)
    prompt = Prompt.of_tokens([5, 6, 7], id=1)

    def entropy_of(text, entropies):
        ids = [*tokenizer.ids(text), tokenizer.eos_id]
        tokens = np.array([*prompt.tokens, *ids], np.int32)
        values = np.zeros(len(tokens), np.float32)
        values[-len(entropies) :] = entropies
        zeros = np.zeros(len(tokens), np.int32)
        rollout = Rollout(prompt, 0, tokens, values, values, False, zeros, 0)
        return judge._verdict_entropy(rollout)

    last = tokenizer.ids("12")
    assert len(last) == 2
    assert entropy_of("7\n12", [9, 8, 0.5, 0.25, 0.125]) == 0.5
    assert entropy_of("7\n12", [9, 8, 0.25, 0.5, 0.75]) == 0.75  # whether it ends there
    assert entropy_of("7\n12\n", [9, 8, 0.25, 0.5, 1, 2]) == 2
    assert entropy_of("1" * 20, [7, *[0.25] * 16]) == 0.25  # the latest 16 tokens
    replies = judge(QUESTIONS)
    assert all((x.entropy_nats is None) == bool(x.failure) for x in replies)
    assert all(0 <= x.entropy_nats < np.log(384) for x in replies if not x.failure)


def test_the_answers_are_of_the_weights_that_it_has_now(judge):
    before, other = judge(QUESTIONS), judge_of(1)
    saved_params, judge.params = judge.params, other.params
    try:
        assert judge(QUESTIONS) == other(QUESTIONS) != before
    finally:
        judge.params = saved_params
    assert judge(QUESTIONS) == before


def test_what_a_judge_of_our_own_needs_is_checked_before_a_run():
    base = tiny_run()

    def validated(judge, **changed):
        rewards = dataclasses.replace(base.rewards, judge=judge)
        dataclasses.replace(base, rewards=rewards, **changed).validate()

    validated(dataclasses.replace(JUDGE, prompt_buckets=(48,)))
    with pytest.raises(ConfigError, match=r"rewards\.judge\.prompt_buckets \+ max_tokens"):
        validated(EngineJudgeConfig())
    with pytest.raises(ConfigError, match=r"rewards\.judge\.weights = 'x' with rollout_apart"):
        judge = dataclasses.replace(JUDGE, prompt_buckets=(48,), weights="x")
        validated(judge, rollout_apart=True)
    with pytest.raises(ConfigError, match=r"rewards\.judge\.prompt_buckets"):
        dataclasses.replace(JUDGE, prompt_buckets=(48, 32)).validate()
    with pytest.raises(ConfigError, match=r"rewards\.judge\.temperature"):
        dataclasses.replace(JUDGE, temperature=1e-5).validate()


def run_with(folder, judge, monkeypatch):
    """Returns (the judge's calls, metrics, groups) of two steps on open questions, in which a hash
    of the judge's text is the verdict; then those of the second step again, after a kill before its
    checkpoint.
    """
    file = folder / "open.jsonl"
    rows = [{"prompt": f"Say {n}.", "answer": "No."} for n in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = tiny_run()
    config = evolve(
        base,
        run_dir=str(folder / "run"),
        model={"max_positions": 4096},
        data={
            "sources": (FileSource(str(file), verifier="judge"),),
            "heldout_frac": 0.0,
            "eval_prompts": 0,
        },
        rewards={"judge": judge},
        log=LogConfig(tokens=0),
    )
    calls, real = [], OwnJudge.__call__

    def call(self, questions):
        calls.append((len(questions), self.params is not None))
        return real(self, questions)

    monkeypatch.setattr(OwnJudge, "__call__", call)
    monkeypatch.setattr(judging, "verdict", lambda text: stable_id(text) % 3 - 1)
    results = []
    for _ in range(2):
        run_rl(config)
        results.append((list(calls), numbers(folder / "run"), lines(folder / "run", "rollouts")))
        shutil.rmtree(folder / "run" / "checkpoints" / "step_00000002")
        calls.clear()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["", "checkpoint"])
def test_a_run_judged_by_an_engine_of_our_own_repeats_its_steps_after_a_kill(
    weights, tmp_path, monkeypatch
):
    judge = EngineJudgeConfig(
        weights, prompt_buckets=(2048,), max_tokens=16, slots=4, temperature=1.0
    )
    if weights:
        base = tiny_run()
        model = dataclasses.replace(base.model, max_positions=4096)
        save_params(
            random_params(model, seed=3),
            model,
            tmp_path / "weights",
            "float32",
            tokenizer_from=base.data.tokenizer,
        )
        judge = dataclasses.replace(judge, weights=str(tmp_path / "weights"))
    (calls, first, groups), (repeated_calls, second, repeated) = run_with(
        tmp_path, judge, monkeypatch
    )
    assert [n for n, _ in calls] == [32, 32] and all(has_params for _, has_params in calls)
    assert not repeated_calls, "all verdicts of the second step were known"
    assert first == second and groups == repeated
    rewards = {sample["reward"] for group in groups for sample in group["samples"]}
    assert rewards == {0, 0.5, 1} and all(row["reward/unknown_frac"] == 0 for row in first)
