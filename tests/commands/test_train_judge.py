"""`compass train-judge`: SFT on verdicts, RL with the verdict as the answer, held-out pairs."""

import dataclasses
import json
import random
from concurrent.futures import Future
from functools import partial

import jax
import pytest
from evolve import evolve
from judged import quoted
from logged import lines, numbers
from tiny import random_params
from tiny_run import tiny_run

from compass_jax.apps.pipeline import train_judge
from compass_jax.apps.pipeline.train_judge import balance
from compass_jax.commands import eval_judge
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError, DataConfig, EvalSet, FileSource, MoEConfig, apply
from compass_jax.config.io import config_from_json, config_to_json, read_config
from compass_jax.data.pairs import split_pairs
from compass_jax.data.preferences import read_preferences
from compass_jax.data.questions import questions
from compass_jax.data.sft import sft_examples
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.transformer import init_params
from compass_jax.rewards.judges.endpoint import Reply
from compass_jax.training.from_files import judge_config
from compass_jax.weights.hf import save_params

SETTINGS = {
    "sft.steps": 2,
    "sft.batch": 4,
    "rl.steps": 2,
    "rl.prompts-per-step": 2,
    "rl.group-size": 3,
    "rl.updates-per-rollout": 1,
    "rollout.slots": 8,
    "rollout.max-new-tokens": 8,
    "data.eval-prompts": 3,
    "mesh.fsdp": 1,
}

SHORT = {"rollout.max_new_tokens": 8}


def larger(count, seed=0):
    """Yields pairs of numbers with the verdict on which is larger, or a tie if they are equal."""
    draw = random.Random(seed)
    for n in range(count):
        one, two = draw.randrange(10), draw.randrange(10)
        two = one if n % 3 == 0 else two
        verdict = "Tie" if one == two else "Better" if one > two else "Worse"
        row = {"prompt": f"{n}: a large number?", "candidate": str(one), "anchor": str(two)}
        yield {**row, "verdict": verdict}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home, base = tmp_path_factory.mktemp("judge"), tiny_run()
    model = dataclasses.replace(base.model, max_positions=1536)
    tokenizer = base.data.tokenizer
    save_params(
        random_params(model, scale=0.1), model, home / "model", "float32", tokenizer_from=tokenizer
    )
    write(home / "pairs.jsonl", larger(60))
    return home


def test_both_orders_of_the_training_pairs_are_learnt_and_no_held_out_one(folder):
    config = judge_config(str(folder / "model"), [str(folder / "pairs.jsonl")], settings=SHORT)
    config.validate_for_rl()
    tokenizer = Tokenizer.for_model(config.data.tokenizer, config.model.vocab_size)
    examples, counts = sft_examples(config.sft, config.scored, tokenizer)
    training, heldout_pairs = split_pairs(config.data)
    assert len(training) + len(heldout_pairs) == 60 and heldout_pairs
    heldout_questions = {x.asks for x in questions(config.data, 0) if x.heldout}
    assert heldout_questions == {pair.question for pair in heldout_pairs}
    texts = [tokenizer.decode(x.tokens) for x in examples]
    learnt = [tokenizer.decode(x.tokens[x.mask]) for x in examples]
    distinct = sum(1 + (pair.gold != 0) for pair in training)  # equal orders of a tie count once
    assert len(examples) == distinct and counts["duplicates"] == len(training) * 2 - distinct
    assert not any(f"> {question}" in text for question in heldout_questions for text in texts)
    assert {word for answer in learnt for word in ("Better", "Tie", "Worse") if word in answer} == {
        *("Better", "Tie", "Worse")
    }
    assert config.sft.buckets[-1] >= max(len(x.tokens) for x in examples)


def test_rare_ties_are_told(tmp_path):
    rows = list(larger(60))
    untied = [row for row in rows if row["verdict"] != "Tie"]
    pair_lists = [list(read_preferences(write(tmp_path / "p.jsonl", x))) for x in (rows, untied)]
    counted, rare = map(balance, pair_lists)
    assert len(counted) == 1 and counted[0].startswith("60 training pairs: Better ")
    assert "0.0% of the pairs are ties" in rare[1] and "add pairs of equally good" in rare[1]
    assert "always says Tie" in balance([x for x in pair_lists[0] if x.gold == 0])[1]


def test_a_judge_needs_preferences():
    with pytest.raises(ConfigError, match="no file of preferences; a judge learns from FileSource"):
        split_pairs(DataConfig(sources=(FileSource("p.jsonl"),)))


def test_pairs_of_an_evaluation_file_are_the_held_out_ones(tmp_path):
    rows = list(larger(9))
    files = (write(tmp_path / name, x) for name, x in (("p.jsonl", rows), ("e.jsonl", rows[:2])))
    one, two = ((FileSource(path, verifier="verdict"),) for path in files)
    training, heldout_pairs = split_pairs(DataConfig(one, two))
    assert [len(training), len(heldout_pairs)] == [7, 2]


def test_pairs_about_a_question_of_an_evaluation_set_are_not_learnt(tmp_path):
    rows = list(larger(9))
    asked = [{"prompt": f" {rows[8]['prompt']}", "answer": "1"}]
    source, pairs, plain = (
        FileSource(write(tmp_path / name, x), verifier=verifier)
        for name, x, verifier in (
            ("p.jsonl", rows, "verdict"),
            ("e.jsonl", rows[:2], "verdict"),
            ("q.jsonl", asked, "math"),
        )
    )
    data = DataConfig((source,), eval_sets=(EvalSet("measured", (pairs, plain)),), heldout_frac=0.0)
    training, heldout_pairs = split_pairs(data)
    questions_learnt = [pair.question for pair in training]
    assert questions_learnt == [row["prompt"] for row in rows[2:8]] and not heldout_pairs


class Says:
    """A judge whose verdicts come from a function."""

    def __init__(self, answer):
        self.generate, self.asked, self.name = answer, [], "says"

    def submit(self, messages):
        self.asked.append((messages, Future()))
        return self.asked[-1][1]

    def run(self):
        for messages, future in self.asked:
            future.set_result(Reply(self.generate(messages)))
        self.asked = []

    def close(self):
        pass


def right(messages):
    one, two = (int(quoted(messages[-1]["content"], x)) for x in ("Candidate", "Anchor"))
    return ("Tie", "Better", "Worse")[(one > two) - (one < two)]


def test_rl_begins_with_what_sft_left_and_the_judge_is_measured_after_each(folder, monkeypatch):
    monkeypatch.chdir(folder)
    seen = []

    def run(name, config, stopped=False):
        seen.append((name, config.directory, config.init_from))
        return {"stopped": stopped, "status": 143}

    def judge(policy, data, seed, weights):
        seen.append(("judge", weights, ""))
        return Says(right if weights.endswith("rl") else lambda _: "Tie")

    monkeypatch.setattr(train_judge, "run_sft", partial(run, "sft"))
    monkeypatch.setattr(train_judge, "run_rl", partial(run, "rl"))
    monkeypatch.setattr(train_judge, "own_judge", judge)
    config = judge_config("model", ["pairs.jsonl"], settings=SHORT)
    config = dataclasses.replace(config, run_dir="stubbed")
    out = train_judge.run_train_judge(config)
    sft, rl = ("stubbed/sft", "stubbed/rl")
    runs = [("sft", sft, "model"), ("judge", sft, ""), ("rl", rl, sft), ("judge", rl, "")]
    assert seen == runs
    assert out["sft"].tie_recall == 1 and out["sft"].preference == 0
    assert out["rl"].agreement == 1 and out["rl"].pairs == len(split_pairs(config.data)[1])
    summary = json.loads((folder / "stubbed" / "judged_rl" / "summary.json").read_text())
    assert summary["agreement"] == 1 and summary["judge"] == rl
    monkeypatch.setattr(train_judge, "run_sft", partial(run, "sft", stopped=True))
    seen.clear()
    assert train_judge.run_train_judge(config)["stopped"] and seen == runs[:1]


def test_a_folder_of_weights_is_a_judge_in_an_engine_that_holds_its_questions(folder, monkeypatch):
    calls = []

    def judge(policy, data, seed, weights):
        calls.append((policy.rollout, weights))
        return Says(right)

    monkeypatch.setattr(eval_judge, "own_judge", judge)
    pairs, model = str(folder / "pairs.jsonl"), str(folder / "model")
    out = folder / "right"
    command = ["eval-judge", pairs, "--model", model, "--max-tokens", "24", "--out", str(out)]
    assert main(command) == 0
    (rollout, weights), config = (
        calls[0],
        judge_config(model, [pairs], settings=SHORT),
    )
    assert weights == model and rollout.max_new_tokens == 24
    assert rollout.prompt_buckets[-1] >= config.rollout.prompt_buckets[-1]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["pairs"], summary["agreement"]) == (60, 1)
    assert main([*command[:-4], "--max-tokens", "0"]) == 2


@pytest.mark.parametrize(("stage", "words"), [("sft", []), ("rl", []), ("scalar", ["--scalar"])])
def test_a_judge_goes_on_with_the_sizes_of_its_run(
    folder, tmp_path, monkeypatch, capsys, stage, words
):
    command = ["train-judge", "--model", str(folder / "model"), *words, "--dry-run", "--json"]
    command += ["--data", str(folder / "pairs.jsonl"), "--rl.group-size", "3"]

    def config():
        assert main(command) == 0
        return config_from_json(capsys.readouterr().out)

    monkeypatch.chdir(tmp_path)
    first = config()
    sizes = {"rl": {"group_size": 5, "prompts_per_step": 2}, "sft": {"micro_batch_tokens": 4321}}
    run = tmp_path / first.directory / stage
    run.mkdir(parents=True)
    (run / "config.json").write_text(config_to_json(evolve(first, **sizes)))
    assert config() == first  # nothing was trained
    (run / "metrics.jsonl").write_text("{}\n")
    sizes["rl"]["group_size"] = 3  # set by the user
    assert config() == evolve(first, **sizes)


@pytest.mark.slow  # compiles for two minutes; the composition is tested above
def test_one_command_tunes_trains_and_measures_and_goes_on(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = [x for name, value in SETTINGS.items() for x in (f"--{name}", str(value))]
    command = ["train-judge", "--model", "model", "--data", "pairs.jsonl", *words]
    assert main(command) == 0
    run = folder / "runs" / "model-pairs"
    assert [len(lines(run / stage)) for stage in ("sft", "rl")] == [2, 2]
    assert read_config(run / "rl").init_from == str(run.relative_to(folder) / "sft")
    measured = [(run / at / "summary.json").read_text() for at in ("judged_sft", "judged_rl")]
    assert [json.loads(x)["pairs"] for x in measured] == [3, 3]
    output = capsys.readouterr().out
    assert "training pairs: Better" in output and "3 held-out pairs" in output
    before = numbers(run / "rl")
    assert main([*command, "--rl.steps", "3"]) == 0  # as after a kill: no step is repeated
    assert numbers(run / "rl")[:2] == before and len(lines(run / "rl")) == 3
    assert len(lines(run / "sft")) == 2
    rl = str(run / "rl")
    assert main(["eval-judge", "pairs.jsonl", "--model", rl, "--most", "2", "--out", "own"]) == 0
    assert json.loads((folder / "own" / "summary.json").read_text())["pairs"] == 2


@pytest.mark.slow  # minutes of training; the composition is tested above
def test_a_tiny_judge_learns_which_digit_is_larger(tmp_path, monkeypatch):
    """The judge starts from random weights and learns from 600 pairs of digits."""
    base = tiny_run()
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 128}
    experts = MoEConfig(experts=4, top_k=2, ffn=64)
    model = dataclasses.replace(base.model, **sizes, moe=experts, max_positions=1024)
    weights = init_params(model, base.compute, jax.random.key(0))
    at, tokenizer = tmp_path / "model", base.data.tokenizer
    save_params(weights, model, at, "float32", tokenizer_from=tokenizer)
    config = judge_config(
        str(at),
        [write(tmp_path / "pairs.jsonl", larger(600))],
        settings=SHORT,
    )
    settings = {"sft.steps": 250, "sft.batch": 16, "sft.optim.learning_rate": 2e-3}
    settings |= {"rl.steps": 10, "rl.prompts_per_step": 8, "rl.group_size": 8}
    settings |= {"rl.optim.learning_rate": 3e-4, "rl.eval_every": 0, "data.eval_prompts": 100}
    settings |= {"mesh.fsdp": 1, "run_dir": str(tmp_path / "run")}
    out = train_judge.run_train_judge(apply(config, settings))
    print(out["sft"], out["rl"])
    assert out["rl"].pairs == 100 and out["rl"].missing < 0.05
    assert out["sft"].agreement > 0.6 and out["rl"].agreement > 0.6
    assert out["rl"].preference > 0.5 and out["rl"].tie_recall > 0.6
