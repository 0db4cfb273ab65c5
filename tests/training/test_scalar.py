"""A scalar reward model: its reward, its loss, its training on pairs, and its rewards in a run."""

import dataclasses
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from tiny import COMPUTE, MODEL, make_prompt, random_params
from tiny_run import tiny_run

from compass_jax.apps.pipeline.train_judge import Rated, run_train_judge
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError, FileSource, LogConfig, ScalarJudgeConfig, ShapingConfig
from compass_jax.data.files import DataError
from compass_jax.data.pairs import Pair, conversation, encode_pairs, split_pairs
from compass_jax.data.preferences import Preference
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.transformer import Transformer, apply
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.judges.scalar import ScalarJudge, tie_margin, verdicts
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training import step
from compass_jax.training.own_judge import ScalarModel
from compass_jax.training.rl import run_rl
from compass_jax.training.scalar import ScalarTrainer, pair_gradients, pair_losses, rewards_of
from compass_jax.training.session import RunState
from compass_jax.training.sft import run_sft
from compass_jax.weights.hf import save_params


def scalar_model(config, *args, **options):
    """Calls `ScalarModel` with what it reads of a run's settings."""
    return ScalarModel(config.policy, config.data, *args, **options)


EOS = 3


def larger(count, seed=0):
    """Yields preferences for the larger of two digits, with a tie if they are equal."""
    draw = random.Random(seed)
    for n in range(count):
        one, two = draw.randrange(10), draw.randrange(10)
        verdict = "Tie" if one == two else "Better" if one > two else "Worse"
        row = {"prompt": f"{n}: large?", "candidate": str(one), "anchor": str(two)}
        yield {**row, "verdict": verdict}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def configured(folder, **sft):
    base = tiny_run()
    pairs = FileSource(write(folder / "pairs.jsonl", larger(240)), verifier="verdict")
    options = {"steps": 40, "batch": 16, "buckets": (24, 40), "micro_batch_tokens": 1280, **sft}
    return evolve(
        base,
        run_dir=str(folder / "run"),
        data={"sources": (pairs,), "heldout_frac": 0.2, "eval_prompts": 40},
        sft={"procedural": (), **options},
    )


def test_the_reward_is_the_end_tokens_logit_after_the_answer_whatever_pads_it():
    model, params = Transformer(MODEL, COMPUTE), random_params()
    rng = np.random.default_rng(0)
    lengths = np.array([7, 3, 9, 0], np.int32)
    tokens = rng.integers(2, MODEL.vocab_size, (4, 9)).astype(np.int32)
    rewards = rewards_of(model, params, tokens, lengths, column=EOS)[0]
    alone, positions = jnp.asarray(tokens[:1, :7]), jnp.arange(7)[None]
    out = jax.jit(apply, static_argnums=0)(
        model, params, alone, positions, mask=jnp.ones((1, 7), bool)
    )
    logits = logits_of(out.hidden[0, -1], head_weights(params))
    np.testing.assert_allclose(rewards[0], logits[EOS], rtol=2e-5, atol=2e-6)
    other = np.where(np.arange(9) < lengths[:, None], tokens, 5)
    np.testing.assert_array_equal(
        rewards_of(model, params, other.astype(np.int32), lengths, column=EOS)[0][:3], rewards[:3]
    )


def test_the_loss_is_that_of_bradley_and_terry_with_a_tie_as_half_a_win(x64):
    candidate = np.array([1.5, -2.0, 0.3, 40.0, -800.0, 0.0])
    anchor = np.array([0.5, 1.0, 0.3, -40.0, 0.0, 3.0])
    gold = np.array([1, -1, 0, -1, 1, 0], np.int32)
    strengths = np.exp(np.longdouble(candidate)), np.exp(np.longdouble(anchor))
    won = strengths[0] / (strengths[0] + strengths[1])
    lost = strengths[1] / (strengths[0] + strengths[1])
    expected = -np.where(gold == 1, np.log(won), np.where(gold == -1, np.log(lost), 0))
    expected = np.where(gold == 0, -(np.log(won) + np.log(lost)) / 2, expected)
    losses = pair_losses(jnp.asarray(candidate), jnp.asarray(anchor), jnp.asarray(gold))
    assert losses.dtype == "float64"
    np.testing.assert_allclose(losses, expected.astype(float), rtol=1e-12)
    exchanged = pair_losses(jnp.asarray(anchor), jnp.asarray(candidate), -jnp.asarray(gold))
    np.testing.assert_allclose(losses, exchanged, rtol=1e-12)


def test_a_threshold_of_ties_is_the_one_that_fits_best():
    margins = np.array([-3.0, -0.4, -0.1, 0.0, 0.2, 0.5, 2.0])
    gold = np.array([-1, 0, 0, 0, 0, 1, 1])
    limit = tie_margin(margins, gold)
    assert limit == 0.4
    np.testing.assert_array_equal(verdicts(margins, limit), gold)
    assert tie_margin(margins, np.sign(margins)) == 0.0
    assert tie_margin(margins, np.zeros(7)) == 3.0
    assert tie_margin(np.zeros(0), np.zeros(0)) == 0.0


def test_no_split_into_micro_batches_changes_the_gradient(tmp_path):
    def total(**options):
        config = configured(tmp_path, router_aux_coef=0.0, **options)
        trainer = ScalarTrainer(config, RunState(), Telemetry(tmp_path, 1, "scalar"))
        examples = trainer.stream.next_batch(16)
        grads, shapes = None, []
        for arrays in trainer.micro_batches(examples):
            shapes.append(arrays[0].shape)
            grads = step.add(grads, trainer.gradients(*arrays)[0])
        return grads, shapes

    one, one_shape = total(buckets=(40,), micro_batch_tokens=2 * 16 * 40)
    many, shapes = total(buckets=(24, 40), micro_batch_tokens=8 * 24)
    assert one_shape == [(32, 40)] and len(shapes) > 3
    for x, y in zip(*map(jax.tree.leaves, (one, many)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_equal_answers_pull_nowhere_and_padding_rows_count_for_nothing():
    model, params = Transformer(MODEL, COMPUTE), random_params()
    tokens = np.tile(np.arange(2, 8, dtype=np.int32), (4, 1))
    lengths = np.array([6, 0, 6, 0], np.int32)
    weight = np.array([1, 0], np.float32)
    for gold in (1, 0):
        arrays = tokens, lengths, np.array([gold, 0], np.int32), weight
        grads, metrics = pair_gradients(model, params, *arrays, 0.0, column=EOS)
        assert metrics["loss"][0] == pytest.approx(np.log(2), rel=1e-6)
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(grads)) < (1 if gold else 1e-9)


def test_pairs_that_cannot_be_learnt_are_left_out_and_told():
    base = tiny_run()
    tokenizer = Tokenizer.for_model(base.data.tokenizer, base.model.vocab_size)
    rows = [
        Preference("q", "a", "b", 1, "p.jsonl:1"),
        Preference("q", "a", "b", 1, "p.jsonl:2"),
        Preference("q", "a", "b", -1, "p.jsonl:3"),  # people disagree: both are kept
        Preference("q", "a" * 99, "b", 1, "p.jsonl:4"),
    ]
    messages = []
    pairs, counts = encode_pairs(rows, tokenizer, 40, messages.append)
    assert [pair.gold for pair in pairs] == [1, -1]
    assert (counts["duplicates"], counts["too_long"], counts["examples"]) == (1, 1, 2)
    assert counts["tokens"] == sum(pair.size for pair in pairs)
    assert messages == [
        "1 pairs repeat an earlier one; they are left out",
        "1 pairs exceed 40 tokens; they are left out",
    ]
    expected, _ = tokenizer.encode_example(conversation("q", "a"))
    np.testing.assert_array_equal(pairs[0].candidate, expected)
    assert expected[-1] == tokenizer.eos_id
    with pytest.raises(DataError, match=r"no pairs are left: 4 are longer than sft\.buckets"):
        encode_pairs(rows, tokenizer, 4, messages.append)
    assert Pair(expected, expected[:-1], 0).key != Pair(expected[:-1], expected, 0).key


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scalar")
    config = configured(folder)
    return config, run_train_judge(config, scalar=True)


def test_it_learns_which_digit_is_larger(trained):
    config, result = trained
    run = Path(config.directory) / "scalar"
    report = result["scalar"]
    assert report.pairs == len(split_pairs(config.data)[1][:40]) > 20 and report.missing == 0
    assert report.preference > 0.8 and report.position_bias == 0
    losses = [row["scalar/loss"] for row in numbers(run)]
    assert len(losses) == 40 and np.mean(losses[-5:]) < 0.6 * losses[0]
    assert losses[0] == pytest.approx(np.log(2), abs=0.3)
    assert {row["stage"] for row in lines(run)} == {"scalar"}
    judged = Path(config.directory) / "judged_scalar"
    summary = json.loads((judged / "summary.json").read_text())
    assert summary["agreement"] == report.agreement and summary["tie_margin"] >= 0
    rows = [json.loads(x) for x in (judged / "rulings.jsonl").read_text().splitlines()]
    assert all(row["first"] == -row["swapped"] for row in rows)


def test_a_stopped_training_of_it_goes_on_exactly(trained, tmp_path):
    config = dataclasses.replace(trained[0], run_dir=str(tmp_path / "again"))
    short = evolve(config, sft={"steps": 17})
    run_sft(short, kind=ScalarTrainer)
    run_sft(config, kind=ScalarTrainer)
    assert numbers(tmp_path / "again") == numbers(Path(trained[0].directory) / "scalar")


def test_its_verdicts_name_a_pair_that_is_too_long():
    def rate(texts):
        return [None if len(text) > 2 else float(text) for _, text in texts]

    pairs = [Preference("q", *x, "p:1") for x in (("3", "1", 1), ("2", "2", 0), ("5", "4", 0))]
    rated = Rated(rate, pairs)
    assert rated.margin == 1.0
    rows = [*pairs, Preference("q", "999", "1", 1, "p:4"), Preference("q", "1", "9", -1, "p:5")]
    rulings = rated.ruled(rows)
    assert [x.first for x in rulings] == [1, 0, 0, None, -1]
    assert [x.swapped for x in rulings] == [-1, 0, 0, None, 1]
    assert rulings[3].failures == ("refused", "refused")


def test_a_dry_run_says_what_would_be_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = tiny_run()
    save_params(
        random_params(base.model),
        base.model,
        tmp_path / "model",
        "float32",
        tokenizer_from=base.data.tokenizer,
    )
    write(tmp_path / "pairs.jsonl", larger(30))
    command = ["train-judge", "--model", "model", "--data", "pairs.jsonl", "--scalar", "--dry-run"]
    assert main([*command, "--mesh.fsdp", "1"]) == 0
    output = capsys.readouterr().out
    assert "runs/model-pairs/scalar" in output and "examples" in output
    assert "runs/model-pairs/rl" not in output


def open_run(folder, judge, rows, **changed):
    base = tiny_run()
    source = FileSource(write(folder / "open.jsonl", rows), verifier="judge")
    data = dataclasses.replace(base.data, sources=(source,), heldout_frac=0.0, eval_prompts=0)
    rewards = dataclasses.replace(base.rewards, judge=judge)
    log = LogConfig(tokens=0)
    return dataclasses.replace(
        base, run_dir=str(folder / "rl"), data=data, rewards=rewards, log=log, **changed
    )


@pytest.mark.slow
def test_a_run_is_rewarded_by_it(trained, tmp_path):
    """A sample's reward is sigmoid(r(answer) - r(anchor)) of the logged text, and 0 if that text is
    empty; a sampled control token is a text of many tokens there.
    """
    weights = f"{trained[0].directory}/scalar"
    judge = ScalarJudgeConfig(weights, buckets=(40, 128), micro_batch_tokens=256)
    rows = [{"prompt": f"{n}: large?", "answer": str(n)} for n in range(8)]
    config = open_run(tmp_path, judge, rows)
    run_rl(config)
    rate = scalar_model(trained[0], weights, (128,), 128)
    groups = lines(Path(config.directory), "rollouts")
    assert len(groups) >= 4
    varied = 0
    for group in groups:
        anchor = rows[int(group["prompt"].split(":")[0])]["answer"]
        samples = group["samples"]
        texts = [x["response"] for x in samples]
        *rates, other = rate([(group["prompt"], x) for x in [*texts, anchor]])
        expected = [
            1 / (1 + np.exp(other - x)) if text.strip() else 0.0
            for x, text in zip(rates, texts, strict=True)
        ]
        np.testing.assert_allclose([x["reward"] for x in samples], expected, atol=1e-5)
        varied += len(set(expected)) > 1
    assert varied
    assert numbers(Path(config.directory))[0]["reward/judge_refused/mean"] == 0


def rating(function, field="answer"):
    """Returns a scalar judge whose model is a function of the text."""
    judge = ScalarJudge(field)
    judge.rate = lambda texts: [function(text) for _, text in texts]
    return judge


def prompt(row):
    return dataclasses.replace(make_prompt(0, 4), row=json.dumps(row), question="q")


def test_an_empty_answer_has_no_reward_where_the_anchor_has_text():
    judge = rating(lambda text: 9.0)
    empty = {"answer": " "}
    for key, text, row in (("a", " ", {"answer": "1"}), ("b", "", empty), ("c", "2", empty)):
        judge.submit(key, prompt(row), text)
    scores = dict(judge.collect(None))
    assert {key: x.reward for key, x in scores.items()} == {"a": 0.0, "b": 0.5, "c": 0.5}
    assert all(x.known for x in scores.values())


def test_samples_without_a_reward_are_left_out_and_told_once(caplog):
    judge = rating(lambda text: None if text == "long" else float(text))
    anchored, bare = prompt({"answer": "1"}), prompt({"other": "1"})
    judge.submit("a", anchored, "<think>9</think>2")
    judge.submit("b", bare, "2")
    judge.submit("c", anchored, lambda: "long")
    judge.submit("d", anchored, "nan")
    judge.submit("e", anchored, "-inf")
    assert judge.collect(0) == [] and judge.outstanding == 5
    scores = dict(judge.collect(None))
    assert judge.outstanding == 0
    assert scores["a"].reward == pytest.approx(1 / (1 + np.exp(-1))) and scores["a"].known
    assert scores["a"].components["scalar"] == 2
    unscored = [scores[key] for key in "bcde"]
    assert not any(x.known for x in unscored)
    assert [x.components for x in unscored] == [{"judge_refused": 1.0}] * 4
    assert "no column 'answer'" in unscored[0].detail and "judge.buckets" in unscored[1].detail
    assert "not finite" in unscored[2].detail and "not finite" in unscored[3].detail
    assert not caplog.records  # there was a reward before


def test_where_nothing_is_rated_the_run_ends_and_says_why(caplog):
    judge = rating(lambda text: 0.0, "sft_answer")
    for n in range(8):
        judge.submit(n, prompt({"answer": "1"}), "2")
    with pytest.raises(
        VerifierError, match=r"8 samples were refused and none was rated: .*sft_ans"
    ):
        judge.collect(None)
    assert len(caplog.records) == 1
    judge.submit(9, prompt({"answer": "1"}), "2")
    judge.rate = None
    with pytest.raises(ConfigError, match="rates in `compass train` alone"):
        judge.collect(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"judge": {"buckets": (64, 64)}}, "must increase"),
        ({"judge": {"buckets": (256,)}}, r"exceed model\.max_positions = 128"),
        ({"shaping": ShapingConfig(length_penalty=0.1)}, "set rl.shaping's penalties to 0"),
    ],
)
def test_settings_that_a_scalar_model_cannot_have(change, message, tmp_path):
    judge = ScalarJudgeConfig(**{"weights": "x", "buckets": (64,), **change.get("judge", {})})
    config = open_run(tmp_path, judge, [{"prompt": "q", "answer": "a"}])
    if "shaping" in change:
        config = evolve(config, rl={"shaping": change["shaping"]})
    with pytest.raises(ConfigError, match=message):
        config.validate_for_rl()


def test_weights_that_are_not_there_end_the_start(tmp_path):
    judge = ScalarJudgeConfig(str(tmp_path / "nowhere"), buckets=(64,))
    config = open_run(tmp_path, judge, [{"prompt": f"{n}?", "answer": "a"} for n in range(8)])
    with pytest.raises(Exception, match="nowhere"):
        run_rl(config)
