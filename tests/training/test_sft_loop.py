"""A real tiny SFT run: the tokens that it learns from, the split of an update, and resuming."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from safetensors.numpy import load_file
from stops import Killed, at_step, kill_after_step, stop_at_call
from tiny_run import tiny_run

from compass_jax.config import OptimConfig
from compass_jax.data.sft import SFTExample
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.transformer import init_params
from compass_jax.runs.rundir import RunDirectoryGone
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training import optim, step
from compass_jax.training.optim import TrainingDiverged
from compass_jax.training.session import RunState
from compass_jax.training.sft import SFTTrainer, run_sft
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf
from compass_jax.weights.hf_config import read_hf_config


def configured(directory, **options):
    config = tiny_run()
    return evolve(config, run_dir=str(directory), sft={**options})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sft")
    return directory, run_sft(configured(directory, steps=8))


def test_a_run_learns_and_reports(undisturbed):
    directory, result = undisturbed
    metrics = numbers(directory)
    assert {row["stage"] for row in lines(directory)} == {"sft"}
    assert (
        len(metrics) == 8
        and metrics[0]["sft/loss"] > 3
        and metrics[-1]["sft/loss"] < 0.6 * metrics[0]["sft/loss"]
    )
    assert all(
        m["grad_norm"] > 0 and m["lr"] == pytest.approx(1e-2) and m["moe/load_max_over_mean"] >= 1
        for m in metrics
    )
    assert [m["epoch"] for m in metrics] == pytest.approx(
        [8 * (n + 1) / result["data"]["examples"] for n in range(8)]
    )
    assert result["steps"] == 8 and not result["stopped"] and checkpoint.latest(directory) == 8


def test_the_export_of_a_run_that_drew_its_model_has_no_rows_beyond_the_tokenizer(
    undisturbed, tmp_path
):
    known = Tokenizer.load(tiny_run().data.tokenizer).vocab_size
    assert tiny_run().model.vocab_size > known
    out = export_hf(undisturbed[0], tmp_path / "out")
    assert read_hf_config(out).vocab_size == known
    tensors = load_file(out / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert tensors[name].shape[0] == known


def test_a_killed_run_repeats_its_steps_and_logs_each_once(undisturbed, tmp_path, monkeypatch):
    """The run is killed after step 3, once before any checkpoint and once after that of step 2. The
    same command gives the undisturbed run's numbers.
    """

    for name, every in (("early", 0), ("later", 2)):
        with monkeypatch.context() as patch:
            kill_after_step(patch, 3)
            with pytest.raises(Killed):
                run_sft(configured(tmp_path / name, steps=8, save_every=every))
        assert checkpoint.latest(tmp_path / name) == (2 if every else None)
        run_sft(configured(tmp_path / name, steps=8, save_every=every))
        assert numbers(tmp_path / name) == numbers(undisturbed[0])


def test_a_stop_request_is_heeded_between_two_micro_batches(tmp_path, monkeypatch):
    """The examples of the update that was thrown away come again."""
    config = configured(tmp_path, steps=8, micro_batch_tokens=104 * 4)
    with monkeypatch.context() as patch:
        stop_at_call(patch, step, "sft_gradients", 5)  # the first of the third update's two
        result = run_sft(config)
    assert result["stopped"] and result["steps"] == 2 == checkpoint.latest(tmp_path)
    assert run_sft(config)["steps"] == 8
    uninterrupted = configured(tmp_path / "whole", steps=8, micro_batch_tokens=104 * 4)
    run_sft(uninterrupted)
    assert numbers(tmp_path) == numbers(tmp_path / "whole")


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    undisturbed, tmp_path, capsys
):
    """The lines that it logged after that checkpoint are removed; the damaged one is named and
    kept.
    """
    config = configured(tmp_path, steps=8, save_every=2)
    run_sft(config)
    newest = checkpoint.locate(tmp_path)
    file = max(newest.rglob("ocdbt*/d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert run_sft(config)["steps"] == 8 and numbers(tmp_path) == numbers(undisturbed[0])
    output = capsys.readouterr().out
    assert f"{newest} is damaged and was passed over: arrays/" in output
    assert "its digest does not fit; going on from step_00000006" in output
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["damaged_step_00000008", "step_00000006", "step_00000008"]


@pytest.mark.slow
def test_parameters_in_bfloat16_learn_as_in_float32_and_go_on_exactly(
    undisturbed, tmp_path, monkeypatch
):
    """The optimizer has a float32 master, which a run that is killed after the checkpoint of step 2
    restores.
    """

    def run(name):
        config = configured(tmp_path / name, steps=8, save_every=2)
        run_sft(evolve(config, compute={"param_dtype": "bfloat16", "dtype": "bfloat16"}))
        return numbers(tmp_path / name)

    uninterrupted = run("whole")
    wide = [m["sft/loss"] for m in numbers(undisturbed[0])]
    np.testing.assert_allclose([m["sft/loss"] for m in uninterrupted], wide, rtol=0.05)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after_step(patch, 3)
        run("killed")
    assert checkpoint.latest(tmp_path / "killed") == 2 and run("killed") == uninterrupted


def test_ctrl_c_saves_and_the_run_goes_on(undisturbed, tmp_path, monkeypatch):
    at_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = run_sft(configured(tmp_path, steps=8))
    assert result["stopped"] and result["steps"] == 2 and checkpoint.latest(tmp_path) == 2
    assert result["status"] == 130
    assert not run_sft(configured(tmp_path, steps=8))["stopped"]
    assert numbers(tmp_path) == numbers(undisturbed[0])


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_whose_directory_is_removed_ends_with_an_error(tmp_path, monkeypatch, number):
    """It ends at the next line of the log, or at the checkpoint after the last line, and does not
    create the directory again.
    """
    path = tmp_path / "run"
    at_step(monkeypatch, number, lambda: path.rename(tmp_path / "moved"))
    with pytest.raises(RunDirectoryGone, match="was removed or replaced while this process"):
        run_sft(configured(path, steps=2))
    assert not path.exists()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Returns an SFT trainer before its first step."""
    directory = tmp_path_factory.mktemp("trainer")
    config = configured(
        directory, router_aux_coef=0.0, optim=OptimConfig(learning_rate=1e-3, clip_grad_norm=1e9)
    )
    return SFTTrainer(config, RunState(), Telemetry(directory, 1, "sft"))


def gradient_of(trainer, examples, monkeypatch, micro_batch_tokens=104 * 8):
    """Returns the gradient that one update gives to the optimiser, and the update's metrics."""
    gradients = []

    def catch(state, grads, **_):
        gradients.append(grads)
        return state, {}

    monkeypatch.setattr(step, "apply", catch)
    monkeypatch.setattr(
        trainer, "sft", dataclasses.replace(trainer.sft, micro_batch_tokens=micro_batch_tokens)
    )
    metrics, _ = trainer._update(examples)
    return gradients[0], metrics


def relative(a, b):
    def norm(tree):
        return float(optim.global_norm(tree))

    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(b)


def test_the_loss_is_on_the_assistants_tokens_alone_and_no_split_changes_it(trainer, monkeypatch):
    examples = trainer.stream.next_batch(8)
    texts = [trainer.tokenizer.decode(e.tokens[e.mask]) for e in examples]
    prompts = [trainer.tokenizer.decode(e.tokens[~e.mask]) for e in examples]
    assert all("=" in text for text in texts) and all(
        "arithmetic problem" in prompt for prompt in prompts
    )
    full, full_metrics = gradient_of(trainer, examples, monkeypatch)
    halves, halves_metrics = gradient_of(trainer, examples, monkeypatch, 104 * 4)
    assert relative(halves, full) < 2e-6 and float(halves_metrics["loss"][0]) == pytest.approx(
        float(full_metrics["loss"][0]), rel=1e-6
    )

    logps = [reference_logp(trainer, e) for e in examples]  # one sequence at a time
    loss = -sum(float(logp[e.mask].sum()) for logp, e in zip(logps, examples, strict=True)) / sum(
        e.mask.sum() for e in examples
    )
    assert float(full_metrics["loss"][0]) == pytest.approx(loss, rel=1e-5)

    bare = [SFTExample(e.tokens, np.zeros_like(e.mask), e.label) for e in examples]
    zero_gradient, zero_metrics = gradient_of(trainer, bare, monkeypatch)
    assert float(zero_metrics["loss"][0]) == 0 and float(optim.global_norm(zero_gradient)) == 0


def reference_logp(trainer, example):
    """Returns log softmax of the logits at t-1, at token t, in float64 on the host."""
    from compass_jax.model.logprobs import head_weights, logits_of
    from compass_jax.model.transformer import apply

    tokens = np.pad(example.tokens, (0, 104 - len(example.tokens)))[None]
    positions = np.arange(104, dtype=np.int32)[None]
    hidden = jax.jit(
        lambda p, x: (
            apply(
                trainer.model,
                p,
                x,
                jnp.asarray(positions),
                mask=jnp.asarray(positions < len(example.tokens)),
            ).hidden
        )
    )
    logits = np.asarray(
        logits_of(
            hidden(trainer.state.params, jnp.asarray(tokens)), head_weights(trainer.state.params)
        )[0],
        np.float64,
    )
    logits = logits[:, : trainer.tokenizer.vocab_size]  # the head's other columns are no tokens
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return np.array([0.0, *(logp[t - 1, example.tokens[t]] for t in range(1, len(example.tokens)))])


def test_nan_is_skipped_and_stops_the_run_after_three_in_a_row(tmp_path, monkeypatch):
    def poisoned(*args, real=step.sft_gradients):
        grads, metrics = real(*args)
        return jax.tree.map(lambda g: g * jnp.nan, grads), metrics

    monkeypatch.setattr(step, "sft_gradients", poisoned)
    with pytest.raises(TrainingDiverged, match="3 updates in a row had a non-finite gradient"):
        run_sft(configured(tmp_path, steps=8, save_every=1))
    assert [m["grad_norm"] for m in numbers(tmp_path)] == [None, None] and checkpoint.latest(
        tmp_path
    ) == 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = configured(tmp_path)
    other = dataclasses.replace(config.model, hidden=16, layers=1)
    checkpoint.save(
        tmp_path,
        1,
        {"state": {"params": init_params(other, config.compute, jax.random.key(0))}},
        {},
        model=other,
    )
    with pytest.raises(
        checkpoint.CheckpointMismatch,
        match=r"(?s)another model.*model.hidden: 16 in the checkpoint, 32 asked for",
    ):
        run_sft(config)
