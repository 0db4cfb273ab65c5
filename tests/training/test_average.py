"""Averaged weights (optim.average): their recursion in float64, and the evaluations, exports and
later runs that take them while the run itself goes on with its policy.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from hf_folders import tensors_of
from logged import lines, numbers
from safetensors.numpy import load_file
from stops import Killed, at_call, kill, kill_after_step
from test_optim import CONFIG, DECAYS, TOTAL, tree
from tiny_run import TOKENIZER, tiny_run

from compass_jax.apps.plan.programs import fresh_state
from compass_jax.commands.cli import main
from compass_jax.config import ComputeConfig, ConfigError, MeshConfig, OptimConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.devices.sharding import placements
from compass_jax.experience.evaluate import Evaluator
from compass_jax.model.params import decays, param_count, place, training_layout
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.training import evaluations, memory, optim, step
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights import checkpoint
from compass_jax.weights.hf import save_params
from compass_jax.weights.start import restore_params

AVERAGED = dataclasses.replace(CONFIG, schedule="constant", average=0.6)
LORA = LoRAConfig(rank=4, alpha=8.0)


def numpy_average(weights, limit):
    """Returns the average of the first of `weights` after the updates that led to the others."""
    mean = np.asarray(weights[0], np.float64)
    for t, x in enumerate(weights[1:], 1):
        d = min(limit, (1 + t) / (10 + t))
        mean = d * mean + (1 - d) * np.asarray(x, np.float64)
    return mean


def apply(state, gradient, config, decays=DECAYS):
    return step.apply(state, gradient, config=config, total_steps=TOTAL, decays=decays)[0]


def test_the_average_equals_the_recursion_in_float64(x64):
    """Updates that are not applied, for a gradient of 0 or one that is not finite, change it not.

    Its decay reaches the limit of 0.6 at the thirteenth update.
    """
    state = optim.init_state(jax.tree.map(jnp.asarray, tree(0)), AVERAGED, TOTAL)
    weights, skipped = [np.asarray(state.params["embed"])], {2: 0.0, 5: np.nan}
    np.testing.assert_array_equal(state.average["embed"], weights[0])
    for n in range(20):
        gradient = jax.tree.map(jnp.asarray, tree(10 + n, skipped.get(n, 1.0)))
        before = np.asarray(state.average["embed"])
        state = apply(state, gradient, AVERAGED)
        if n in skipped:
            np.testing.assert_array_equal(state.average["embed"], before)
        else:
            weights.append(np.asarray(state.params["embed"]))
    assert int(state.step) == 18
    expected = numpy_average(weights, 0.6)
    np.testing.assert_allclose(state.average["embed"], expected, rtol=1e-10)
    assert np.abs(expected - weights[-1]).max() > 1e-3


def test_of_bfloat16_weights_the_average_is_that_of_the_float32_master():
    config = OptimConfig(learning_rate=1e-4, average=0.9)
    without = dataclasses.replace(config, average=0.0)
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree(0))
    state, plain = (optim.init_state(start, x, TOTAL) for x in (config, without))
    masters = [np.asarray(state.opt_state.master["embed"])]
    for n in range(30):
        gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree(10 + n))
        state, plain = apply(state, gradient, config), apply(plain, gradient, without)
        masters.append(np.asarray(state.opt_state.master["embed"]))
    assert {x.dtype for x in jax.tree.leaves(state.average)} == {jnp.dtype("float32")}
    expected = numpy_average(masters, 0.9)
    np.testing.assert_allclose(state.average["embed"], expected, rtol=1e-6)
    rounded = np.abs(np.asarray(state.params["embed"], np.float32) - expected).max()
    assert rounded > 1e-4  # bfloat16 weights near 1 do not resolve it
    assert plain.average is None  # and it changes nothing else
    for kept, other in zip(state[:-1], plain[:-1], strict=True):
        jax.tree.map(np.testing.assert_array_equal, kept, other)


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_over_a_mesh_the_average_has_the_places_of_the_weights_and_their_numbers(axes):
    base, config = tiny_run(), OptimConfig(learning_rate=0.1, average=0.9)
    params = init_params(base.model, base.compute, jax.random.key(0))
    placement = placements(MeshConfig(**axes), None, False)[0]
    alone, placed = (optim.init_state(params, config, TOTAL) for _ in range(2))
    placed = place(placed, base.model, placement)
    leaves = decays(base.model, "stacked")
    for seed in range(3):
        gradient = init_params(base.model, base.compute, jax.random.key(seed + 1))
        gradients = jax.tree.map(jnp.copy, place(gradient, base.model, placement))
        placed = place(apply(placed, gradients, config, leaves), base.model, placement)
        alone = apply(alone, gradient, config, leaves)
    for mean, weight, expected in zip(
        *map(jax.tree.leaves, (placed.average, placed.params, alone.average)), strict=True
    ):
        assert mean.sharding == weight.sharding
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


# ---- runs ----------------------------------------------------------------------------------------


def configured(directory, average=0.7, **rl):
    config = tiny_run("odd_verifiers:coin")
    optimiser = dataclasses.replace(config.rl.optim, average=average)
    settings = {"optim": optimiser, "steps": 3, "eval_every": 1, **rl}
    return evolve(config, run_dir=str(directory), rl=settings, keep_checkpoints=9)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with evaluations, and the embeddings that they had."""
    directory = tmp_path_factory.mktemp("average") / "run"
    with pytest.MonkeyPatch.context() as patch:
        real, used = evaluations.evaluate, []

        def evaluate(**options):
            used.append(np.asarray(options["params"]["embed"]))
            return real(**options)

        patch.setattr(evaluations, "evaluate", evaluate)
        result = run_rl(configured(directory))
    return directory, result, used


def without_evaluation(rows):
    return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]


def policy(path):
    """Returns the policy's embeddings in a checkpoint."""
    shape, dtype = checkpoint.read_manifest(path).leaves["state/params/embed"]
    abstract = {"state": {"params": {"embed": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))}}}
    return np.asarray(
        checkpoint.restore(path, abstract, subset=True)[1]["state"]["params"]["embed"]
    )


def test_evaluations_have_the_average_and_rollouts_the_policy(whole, tmp_path):
    directory, _, used = whole
    steps = [directory / f"checkpoints/step_{n:08d}" for n in (1, 2, 3)]
    policies = [policy(path) for path in steps]
    assert len(used) == 3
    for path, embed in zip(steps, used, strict=True):
        np.testing.assert_array_equal(embed, restore_params(path)[0]["embed"])
        assert np.abs(embed - policy(path)).max() > 1e-3
    first = init_params(tiny_run().model, tiny_run().compute, jax.random.key(0))["embed"]
    expected = numpy_average([first, *policies], 0.7)
    np.testing.assert_allclose(used[-1], expected, rtol=1e-5, atol=1e-6)
    run_rl(configured(tmp_path / "unseen", eval_every=0))
    run_rl(configured(tmp_path / "none", average=0.0, eval_every=0))
    seen = without_evaluation(numbers(directory))
    assert numbers(tmp_path / "unseen") == seen
    assert lines(tmp_path / "unseen", "rollouts") == lines(directory, "rollouts")
    # Without an average the optimiser is another program, which may round differently.
    for row, expected in zip(numbers(tmp_path / "none"), seen, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
    times = [row["metrics"].get("time/average_s") for row in lines(directory)]
    assert min(times) > 0 and "time/average_s" not in lines(tmp_path / "none")[0]["metrics"]


@pytest.mark.parametrize("where", ["after a step", "in an evaluation"])
def test_a_killed_run_goes_on_with_its_policy_and_its_average(whole, tmp_path, monkeypatch, where):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if where == "after a step":
            kill_after_step(patch, 2)
        else:
            at_call(patch, evaluations, "evaluate", 2, kill)
        run_rl(configured(tmp_path))
    assert checkpoint.latest(tmp_path) == 1
    result = run_rl(configured(tmp_path))
    directory, expected, _ = whole
    assert result["evaluation"] == expected["evaluation"]
    assert numbers(tmp_path) == numbers(directory)
    last = [x / "checkpoints/step_00000003" for x in (tmp_path, directory)]
    for read in (policy, lambda path: restore_params(path)[0]["embed"]):
        np.testing.assert_array_equal(*map(read, last))


@pytest.mark.slow
def test_over_meshes_evaluations_are_those_of_one_device(whole, tmp_path):
    """The rollout has devices of its own, to which the average and the policy go in turn."""
    meshes = {
        "mesh": MeshConfig(fsdp=4),
        "rollout_mesh": MeshConfig(expert=2, tensor=2),
        "rollout_apart": True,
    }
    run_rl(evolve(configured(tmp_path), **meshes))
    rows, expected = (
        # None: undefined for so few prompts
        [{k: v for k, v in row.items() if v is not None and k != "handover/bytes"} for row in of]
        for of in (numbers(tmp_path), numbers(whole[0]))
    )
    for row, expected_row in zip(rows, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-5)
        assert any(name.startswith("eval/") for name in row)


def test_compass_eval_and_export_take_the_average_and_say_so(whole, tmp_path, capsys):
    directory, result, _ = whole
    config = configured(directory)
    evaluated = Evaluator(config.policy, config.scored)(str(directory))
    assert evaluated.metrics() == result["evaluation"].metrics()
    assert main(["export-hf", str(directory), str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert said.count("the weights are the average that the run kept (optim.average)") == 2
    exported = tensors_of(tmp_path / "hf")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(exported, restore_params(directory)[0]["embed"][: len(exported)])
    assert np.abs(exported - policy(directory)[: len(exported)]).max() > 1e-3
    later = evolve(tiny_run(), init_from=str(directory), run_dir=str(tmp_path / "later"))
    run_sft(evolve(later, sft={"steps": 1, "optim": OptimConfig(learning_rate=0.0)}))
    assert capsys.readouterr().out.count("the average that the run kept") == 1
    start = restore_params(tmp_path / "later")[0]["embed"]
    np.testing.assert_array_equal(start, restore_params(directory)[0]["embed"])


def test_bfloat16_weights_are_exported_in_their_type_and_rounded_once(tmp_path):
    """SFT, whose checkpoints have an average too."""
    config = evolve(
        tiny_run(),
        run_dir=str(tmp_path / "run"),
        compute=ComputeConfig(param_dtype="bfloat16", scan_layers=False),
        sft={"optim": OptimConfig(learning_rate=1e-2, average=0.7)},
    )
    run_sft(config)
    manifest = checkpoint.read_manifest(tmp_path / "run")
    shape, dtype = manifest.leaves["state/average/embed"]
    assert dtype == "float32" and manifest.leaves["state/params/embed"][1] == "bfloat16"
    abstract = {"state": {"average": {"embed": jax.ShapeDtypeStruct(shape, jnp.float32)}}}
    arrays = checkpoint.restore(tmp_path / "run", abstract, subset=True)[1]
    expected = arrays["state"]["average"]["embed"].astype(jnp.bfloat16)
    params, _ = restore_params(tmp_path / "run")
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {
        manifest.leaves[name][1] for name in manifest.leaves if name.startswith("state/params/")
    }
    np.testing.assert_array_equal(params["embed"], expected)
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    exported = tensors_of(tmp_path / "hf")["model.embed_tokens.weight"]
    assert exported.dtype == jnp.bfloat16
    np.testing.assert_array_equal(exported, np.asarray(expected)[: len(exported)])


def test_of_adapters_the_adapters_are_averaged(tmp_path, capsys):
    config = tiny_run()
    params = init_params(config.model, config.compute, jax.random.key(3))
    base = save_params(params, config.model, tmp_path / "base", "float32", tokenizer_from=TOKENIZER)
    config = evolve(configured(tmp_path / "run"), init_from=str(base), lora=LORA)
    result = run_rl(config)
    leaves = checkpoint.read_manifest(tmp_path / "run").leaves
    averaged = {x.removeprefix("state/average/") for x in leaves if x.startswith("state/average/")}
    assert averaged == {
        x.removeprefix("state/params/") for x in leaves if x.startswith("state/params/")
    }
    evaluated = Evaluator(config.policy, config.scored)(config.run_dir)
    assert evaluated.metrics() == result["evaluation"].metrics()
    policies = tmp_path / "policies"
    without = dataclasses.replace(config.rl.optim, average=0.0)
    run_rl(evolve(config, run_dir=str(policies), rl={"optim": without}))
    capsys.readouterr()
    tensors = []
    for run in ("run", "policies"):
        out = str(tmp_path / f"{run} adapter")
        assert main(["export-hf", str(tmp_path / run), out, "--adapter"]) == 0
        tensors.append(next(iter(load_file(f"{out}/adapter_model.safetensors").values())))
    assert capsys.readouterr().out.count("the average that the run kept") == 1
    assert np.abs(tensors[0] - tensors[1]).max() > 1e-4
    layers = (restore_params(tmp_path / x)[0]["run_0"]["layer_0"] for x in ("run", "policies"))
    first, second = (layer["attention"]["q"] for layer in layers)
    assert np.abs(first - second).max() > 1e-5


def test_the_estimate_of_the_memory_counts_it():
    config = tiny_run()
    averaged = evolve(config, rl={"optim": dataclasses.replace(config.rl.optim, average=0.9)})
    plain, more = (memory.estimate(x.policy, x.rl) for x in (config, averaged))
    assert more.optimizer == pytest.approx(1.5 * plain.optimizer)
    low, high = (
        memory.estimate(dataclasses.replace(x.policy, lora=LORA), x.rl) for x in (config, averaged)
    )
    assert high.optimizer == pytest.approx(1.5 * low.optimizer) and low.gradients == high.gradients
    model = Transformer(config.model, config.compute, training_layout(config.compute))
    states = (fresh_state(model, x.lora, x.rl.optim) for x in (averaged, config))
    more_bytes, bytes_without = map(memory.tree_bytes, states)
    assert more_bytes - bytes_without == 4 * param_count(config.model)


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan")])
def test_a_decay_outside_its_range_is_refused(value):
    with pytest.raises(ConfigError, match=re.escape(f"rl.optim.average = {value}")):
        configured("x", average=value).validate()


def test_a_run_goes_on_with_the_average_that_it_began_with(whole):
    directory, _, _ = whole
    with pytest.raises(ConfigError, match=r"rl\.optim\.average: 0\.7 in the run, 0\.0 now"):
        run_rl(configured(directory, average=0.0))
