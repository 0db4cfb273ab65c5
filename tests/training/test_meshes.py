"""RL steps over meshes: they have the metrics of one device, also with a disaggregated rollout, and
meshes that do not fit are refused.
"""

import dataclasses
import os
import signal
from functools import cache

import numpy as np
import pytest
from evolve import with_size
from logged import lines, numbers
from replaying import GroupReplay
from stops import stop_at_sample
from tiny_run import tiny_run
from variants import SCREENING

from compass_jax.config import (
    ConfigError,
    MeshConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rollout.drafts import Lenient
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft


def configured(directory, rl=None, **options):
    config = tiny_run("odd_verifiers:coin")
    # ESPO clips at ratios of 1e-5: off policy, a rounding error decides what is clipped
    objective = Grpo()
    rl = dataclasses.replace(
        config.rl, **{"correction": named_correction("tis"), "objective": objective, **(rl or {})}
    )
    return dataclasses.replace(config, run_dir=str(directory), rl=rl, **options)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Returns a function that returns the directory of the run on one device, one step off or not.
    Each of the two runs once, at the first call.
    """

    @cache
    def directory(one_step_off):
        out = tmp_path_factory.mktemp("one")
        run_rl(configured(out, {"one_step_off": one_step_off, "steps": 3}))
        return out

    return directory


def compare(actual, expected):
    assert len(actual) == len(expected) == 3
    for actual_row, expected_row in zip(actual, expected, strict=True):
        assert actual_row.keys() == expected_row.keys()
        for name in expected_row:
            if not name.startswith("handover/"):
                np.testing.assert_allclose(
                    actual_row[name], expected_row[name], rtol=1e-4, atol=1e-5, err_msg=name
                )


MESHES = {
    "fsdp, expert and tensor": {"mesh": MeshConfig(fsdp=2, expert=2, tensor=2)},
    "context, and another mesh for the rollout": {
        "mesh": MeshConfig(context=2, expert=4),
        "rollout_mesh": MeshConfig(expert=4, tensor=2),
    },
    "apart": {
        "mesh": MeshConfig(fsdp=4),
        "rollout_mesh": MeshConfig(expert=2, tensor=2),
        "rollout_apart": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_run_over_a_mesh_is_that_of_one_device(one_device, tmp_path, name):
    disaggregated = name == "apart"
    config = configured(tmp_path, {"one_step_off": disaggregated, "steps": 3}, **MESHES[name])
    run_rl(config)
    compare(numbers(tmp_path), numbers(one_device(disaggregated)))
    if disaggregated:  # the evaluation has the rollout's mesh alone, as with the other meshes
        return
    assert evaluate_weights(config, str(tmp_path)).avg_at_k == pytest.approx(
        evaluate_weights(configured(tmp_path), str(tmp_path)).avg_at_k
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, expert=2, tensor=2)], ids=str)
def test_sequences_that_share_rows_train_as_in_rows_of_their_own(one_device, tmp_path, mesh):
    """A row has at least two sequences. Padding and the experts' load differ, since they depend on
    the micro-batches.
    """
    buckets = configured(tmp_path).rl.buckets
    packed = {"steps": 3, "packed_row_tokens": 2 * buckets[-1]}
    run_rl(configured(tmp_path, packed, mesh=mesh))
    actual, expected = (
        [
            {k: v for k, v in step.items() if k not in ("padding_frac", "moe/load_max_over_mean")}
            for step in numbers(directory)
        ]
        for directory in (tmp_path, one_device(False))
    )
    compare(actual, expected)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(one_device, tmp_path, monkeypatch):
    """The run stops after each step; it is on eight devices, then on one, then on four with the
    rollout on the other four.
    """
    expected = numbers(one_device(False))  # before the signals: this run may start here

    def log(self, step, metrics, *rest, real=Telemetry.log):
        real(self, step, metrics, *rest)
        if step < 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Telemetry, "log", log)
    disaggregated = {
        "mesh": MeshConfig(fsdp=2, tensor=2),
        "rollout_mesh": MeshConfig(expert=4),
        "rollout_apart": True,
    }
    for meshes in ({"mesh": MeshConfig(fsdp=4, tensor=2)}, {}, disaggregated):
        result = run_rl(configured(tmp_path, {"steps": 3}, **meshes))
    assert result["steps"] == 3
    compare(numbers(tmp_path), expected)


REPLAY = {
    "steps": 3,
    "group_size": 2,
    "hooks": (GroupReplay(groups=4, max_age=2, max_route_age=1),),
    "zero_variance": ZeroVarianceConfig(rl_zvp=False),
}
STOPS = {
    "plain": {"steps": 3},
    "partial": {"steps": 3, "partial_prompts": 3},
    "dynamic sampling": {
        "steps": 2,
        "zero_variance": ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True),
        "group_size": 2,
    },
    "screening": {"steps": 2, "step_policy": SCREENING},
    "R2": {"steps": 2, "replay": "R2", "updates_per_rollout": 2},
    "replay": REPLAY,
    "replay, live": REPLAY | {"hooks": (GroupReplay(groups=4, max_age=2),)},
    "drafts": {"steps": 3, "drafts": Lenient()},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_in_a_rollout_over_a_mesh_loses_nothing(tmp_path, monkeypatch, name):
    """After a SIGTERM within a rollout the samples and their routes come back from the checkpoint
    onto the mesh, and the groups are those of an undisturbed run.
    """
    settings = {
        "optim": dataclasses.replace(tiny_run().rl.optim, learning_rate=1e-12),
        **STOPS[name],
    }
    data, number = tiny_run().data, 11
    if name == "drafts":  # sample 40 is of step 3, whose samples have drafts
        data, number = dataclasses.replace(with_size(data, 6), eval_prompts=0), 40
    for mesh, folder in (
        ({}, "whole"),
        (
            {"mesh": MeshConfig(fsdp=2, expert=2), "rollout_mesh": MeshConfig(expert=2, tensor=2)},
            "stopped",
        ),
    ):
        if mesh:
            stop_at_sample(monkeypatch, number)
            assert run_rl(configured(tmp_path / folder, settings, data=data, **mesh))["stopped"]
        config = configured(tmp_path / folder, settings, data=data, **mesh)
        assert run_rl(config)["steps"] == settings["steps"]
    actual, expected = (
        sorted(str(row["samples"]) for row in lines(tmp_path / folder, "rollouts"))
        for folder in ("stopped", "whole")
    )
    assert actual == expected
    if name != "partial":  # the cut in a stopped step depends on the stop
        for stopped, undisturbed in zip(
            *(numbers(tmp_path / folder) for folder in ("stopped", "whole")), strict=True
        ):
            for metric in undisturbed:
                if not metric.startswith(("handover/", "padding_frac")):  # of the mesh
                    np.testing.assert_allclose(
                        stopped[metric], undisturbed[metric], rtol=1e-4, atol=1e-5, err_msg=metric
                    )


def test_supervised_fine_tuning_over_a_mesh(tmp_path):
    config = tiny_run()
    run_sft(dataclasses.replace(config, run_dir=str(tmp_path / "one")))
    run_sft(
        dataclasses.replace(
            config, run_dir=str(tmp_path / "mesh"), mesh=MeshConfig(fsdp=2, expert=2, context=2)
        )
    )
    for actual, expected in zip(numbers(tmp_path / "mesh"), numbers(tmp_path / "one"), strict=True):
        for name in expected:
            np.testing.assert_allclose(
                actual[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
            )


BAD = {
    "tensor": (
        {"mesh": MeshConfig(tensor=4)},
        "mesh.tensor = 4 does not divide model.kv_heads = 2",
    ),
    "expert": (
        {"mesh": MeshConfig(expert=8)},
        "mesh.expert = 8 does not divide model.moe.experts = 4",
    ),
    "zero": ({"mesh": MeshConfig(fsdp=0)}, "mesh.fsdp = 0: must be positive"),
    "rollout": (
        {"mesh": MeshConfig(fsdp=2), "rollout_mesh": MeshConfig(tensor=4)},
        "rollout_mesh.tensor = 4 does not divide model.kv_heads",
    ),
    "unlike": (
        {"mesh": MeshConfig(fsdp=2), "rollout_mesh": MeshConfig(expert=4)},
        "rollout_mesh has 4 devices, mesh 2",
    ),
    "two threads": (
        {"mesh": MeshConfig(fsdp=2), "rl": {"one_step_off": True}},
        "rl.one_step_off on one mesh of 2 devices",
    ),
    "packed rows in parts": (
        {"mesh": MeshConfig(context=2), "rl": {"packed_row_tokens": 112}},
        r"rl\.packed_row_tokens with mesh\.context = 2: .*; set mesh\.context to 1",
    ),
    "short rows": (
        {"rl": {"packed_row_tokens": 55}},
        r"rl\.packed_row_tokens = 55 is less than the longest sequence \(rl\.buckets end at 56\)",
    ),
    "too many": ({"mesh": MeshConfig(fsdp=16)}, "needs 16 devices, there are 8"),
    "too many apart": (
        {"mesh": MeshConfig(fsdp=8), "rollout_apart": True},
        r"mesh \(8\) and rollout_mesh \(8\) together need 16 devices, there are 8",
    ),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_a_mesh_that_does_not_fit_is_refused_with_the_sizes(tmp_path, bad):
    options, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        run_rl(configured(tmp_path, **options))
