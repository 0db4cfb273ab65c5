"""`compass plan` on a small model, with the real compiler for TPUs that are not present."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evolve import evolve

from compass_jax.apps.plan.bound import Bound, answer_lengths, read_share, runs_per_step
from compass_jax.apps.plan.memory import _fewer_tokens, advice, refused_bytes
from compass_jax.apps.plan.programs import Step, topology_devices
from compass_jax.apps.plan.run import CompiledProgram, Plan
from compass_jax.apps.plan.search import layouts
from compass_jax.commands.configured import load_config
from compass_jax.config import MeshConfig
from compass_jax.devices.chips import CHIPS, chip_of
from compass_jax.devices.tpu_flags import COMPILER_ALONE

pytest.importorskip("libtpu")
ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
import dataclasses
from compass_jax.config import MeshConfig, ModelConfig, MoEConfig, RunConfig
from compass_jax.config.pods import pod_run


def small() -> RunConfig:
    model = ModelConfig(
        family="qwen3_moe", vocab_size=1536, hidden=256, layers=6, heads=4, kv_heads=2,
        head_dim=128, ffn=512, moe=MoEConfig(experts=8, top_k=2, ffn=256), max_positions=40_960,
    )
    meshes = MeshConfig(fsdp=2, expert=2), MeshConfig(expert=2, tensor=2)
    run = pod_run("small", model, "", *meshes, slots=64, prompts=4)
    return dataclasses.replace(run, rl=dataclasses.replace(run.rl, buckets=(32_768,)))
"""


def plan(tmp_path, *options):
    """Returns (exit code, the summary or stderr, stderr)."""
    file = tmp_path / "small.py"
    file.write_text(CONFIG)
    command = [sys.executable, "-m", "compass_jax", "plan", str(file), "--json", *options]
    command += ["--any-versions"]  # Python 3.11 only has older versions
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else done.stderr, done.stderr


@pytest.mark.slow
def test_a_step_is_compiled_and_its_memory_is_what_its_arrays_take(tmp_path):
    options = "--answer-tokens", "4000"
    code, report, text = plan(tmp_path, "--topology", "v5p:2x2x1", *options)
    assert (
        code == 0 and report["fits"] and report["hbm_gib_per_chip"] < report["hbm_limit_gib"] < 95
    )
    assert report["devices"] == 4 and report["devices_per_chip"] == 1
    programs, parts, gib = report["programs"], report["parts_gib_per_chip"], 2**30
    names = "hand-over,slots,store,prefill,insert,decode,taken,harvest,prefill evaluation,"
    names += "insert evaluation,prepare,replayed 32768,forward 32768,objective 32768,"
    assert list(programs) == f"{names}backward 32768,add,apply".split(",")
    # 64 slots over expert, two heads over tensor: keys and values of 6 layers in bfloat16; beside
    # them tokens, log-probs, routes.
    cache = 6 * 2 * 64 / 2 * 1 * 32_768 * 128 * 2
    assert cache / gib <= parts["slots"] <= 1.05 * cache / gib
    experts, rest = (
        6 * 3 * 8 * 256 * 256,
        6 * (2 * 256 * 512 + 2 * 256 * 256 + 8 * 256) + 2 * 1536 * 256,
    )
    # experts over all four devices, the rest over fsdp
    assert parts["state"] == pytest.approx(14 * (experts / 4 + rest / 2) / gib, abs=1e-3)
    assert programs["decode"]["memory_gib_per_chip"]["arguments"] == pytest.approx(
        parts["slots"] + parts["decode"], abs=2e-3
    )
    assert programs["forward 32768"]["collectives"]["all-gather"]["count"] > 6  # for each layer
    assert programs["apply"]["bound_s"]["by"] == "HBM" and report["step_bound_s"] > 0
    assert "small fits v5p:2x2x1" in text and "bound on an RL step" in text
    assert report["answer_tokens"] == 4000
    assert 0 < report["step_shorter_s"] < 0.9 * report["step_modelled_s"]
    assert "the same with answers of 4,000 tokens on average (log-normal)" in text


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_advice_that_makes_it_fit(tmp_path):
    code, report, text = plan(tmp_path, "--topology", "v5p:2x2x1", "--rollout.slots", "2048")
    assert code == 1 and not report["fits"] and "does NOT fit" in text
    assert (
        report["hbm_gib_per_chip"] is None or report["hbm_gib_per_chip"] > report["hbm_limit_gib"]
    )
    option, value = report["changes"][0].split(":")[0].split()
    assert (option, value) == ("--rollout.slots", "1024")
    code, report, _ = plan(tmp_path, "--topology", "v5p:2x2x1", option, value)
    assert code == 0 and report["fits"]


V5P = ("--topology", "v5p:2x2x1")
SAMPLERS = ("--samplers.address", "trainer:7070")
BAD = {
    (): "--topology NAME is missing",
    ("--topology", "v5p:1000"): "names are like v5p:4x4x4",
    (
        *V5P,
        "--mesh.fsdp",
        "8",
        "--rollout-mesh.replica",
        "4",
    ): "mesh has 16 devices, the topology 4: lower an axis",
    (
        "--topology",
        "v5p:2x2x2",
    ): "mesh has 4 devices, the topology 8: raise an axis, or name a smaller topology",
    (*V5P, "--rollout-apart", "True"): "mesh and rollout_mesh have 8 devices, the topology 4",
    (*V5P, "--answer-tokens", "30721"): "must be from 1 to rollout.max_new_tokens = 30720",
    (*V5P, "--samplers", "2"): "--samplers 2: the run has none, since samplers.address is empty",
    (*V5P, *SAMPLERS, "--samplers", "2", "--search", "1"): "--samplers 2 with --search",
    (*V5P, *SAMPLERS, "--samplers", "-1"): "--samplers -1: must be at least 0",
    (
        *V5P,
        *SAMPLERS,
        "--samplers",
        "2",
        "--rollout-mesh.replica",
        "2",
    ): "rollout_mesh has 8 devices, the topology 4: lower an axis",
    (
        "--topology",
        "v5p:2x2x2",
        *SAMPLERS,
    ): "mesh has 4 devices, the topology 8: raise an axis",
    ("--topology", "v4:2x2x1"): "no peaks are known of TPU v4; known are v5p",
}
ASK = """
import contextlib, io, json, sys
from compass_jax.commands.cli import main

told = []
for options in json.loads(sys.argv[2]):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = main(["plan", sys.argv[1], "--json", "--any-versions", *options])
    told.append([code, text.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Returns the command's exit code and message for each of BAD."""
    file = tmp_path_factory.mktemp("plan") / "small.py"
    file.write_text(CONFIG)
    command = [sys.executable, "-c", ASK, str(file), json.dumps(list(BAD))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return dict(zip(BAD, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("options", BAD)
def test_bad_requests_are_told(refusals, options):
    code, text = refusals[options]
    assert code == 2 and BAD[options] in text and "Traceback" not in text


def test_chips_are_known_by_what_jax_calls_them():
    kinds = [
        "TPU v5",
        "TPU v5p",
        "TPU v6 lite",
        "TPU v6e",
        "TPU7x",
        "TPU v7x",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA A100-SXM4-80GB",
    ]
    names = ["v5p", "v5p", "v6e", "v6e", "tpu7x", "tpu7x", "H100", "H200", "A100"]
    assert [chip_of(kind).name for kind in kinds] == names
    assert chip_of("cpu") is None and chip_of("TPU v5 lite") is None
    assert all(chip.device_flops * chip.devices == chip.bf16_tflops * 1e12 for chip in CHIPS)


def test_refusals_of_the_compiler_are_read():
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 120.50G of 95.74G hbm."
        " Exceeded hbm capacity by 24.76G."
    )
    assert refused_bytes(RuntimeError(text)) == int(120.5 * 2**30)
    assert (
        refused_bytes(RuntimeError("RESOURCE_EXHAUSTED: no numbers")) == -1
        and refused_bytes(ValueError("something else")) is None
    )


@pytest.mark.slow
def test_a_search_compiles_the_likeliest_and_ranks_them(tmp_path):
    code, report, text = plan(tmp_path, "--topology", "v5p:2x2x1", "--search", "2")
    assert code == 0 and report["fits"]
    assert "compiling 2" in text and "layouts of the training on v5p:2x2x1" in text
    assert text.count(" yes ") == 2 and text.index(
        "layouts divide model and topology"
    ) > text.index("small fits v5p:2x2x1")


_SHORT = (
    "--rl.buckets 2048 --rollout.max-new-tokens 1024 --rollout.prompt-buckets 1024"
    " --rollout.prefill-chunk 1024 --rollout.slots 16 --rollout.cache-bucket 1024"
    " --rl.shaping.length-free-tokens 512"
)
SHORT = _SHORT.split()


@pytest.mark.slow
def test_a_rollout_on_devices_of_its_own_is_planned_with_what_goes_on_in_its_slots(tmp_path):
    options = "--rl.micro-batch-tokens 8192 --rollout-apart True --rl.one-step-off True"
    options += " --rollout.cache-pages 256"
    code, report, _ = plan(tmp_path, "--topology", "v5p:2x2x2", *SHORT, *options.split())
    assert code == 0 and report["devices"] == 8
    programs, parts = (
        {name: x["memory_gib_per_chip"]["live"] for name, x in report["programs"].items()},
        report["parts_gib_per_chip"],
    )
    assert (
        {"resume", "insert resumed"} < programs.keys()
        and parts["slots"] > 0
        and parts["decode"] > 0
    )
    # no memory of the training
    assert programs["prefill"] == pytest.approx(parts["store"] + parts["slots"], abs=2e-3)
    # no memory of the rollout
    assert programs["apply"] == pytest.approx(parts["replayed"], abs=2e-3)


@pytest.mark.slow
def test_training_and_samplers_are_planned_on_their_own_devices(tmp_path):
    """Neither plan contains the other's memory. The training keeps a decoding copy for samplers
    that join. A sampler keeps the routes of unfinished samples, and weights that arrive meanwhile.
    """
    options = (*SHORT, *SAMPLERS, "--rl.micro-batch-tokens", "8192", "--rl.one-step-off", "True")
    options += ("--samplers.lockstep", "False")
    code, training, text = plan(tmp_path, *V5P, *options)
    assert code == 0 and "the training of small fits v5p:2x2x1" in text
    kinds = {name.split()[0] for name in training["programs"]}
    assert kinds >= {"hand-over", "forward", "backward", "apply"}
    assert not kinds & {"slots", "store", "prefill", "decode", "harvest"}
    parts = training["parts_gib_per_chip"]
    live = training["programs"]["apply"]["memory_gib_per_chip"]["live"]
    assert live == pytest.approx(parts["decode"] + parts["replayed"], abs=2e-3)
    code, one, text = plan(tmp_path, *V5P, *options, "--samplers", "2")
    assert code == 0 and "a sampler of small fits v5p:2x2x1" in text
    programs, parts = one["programs"], one["parts_gib_per_chip"]
    assert {"slots", "store", "prefill", "resume", "decode", "harvest"} <= programs.keys()
    assert not {"hand-over", "taken", "forward 2048", "apply"} & programs.keys()
    assert parts["next"] == parts["decode"] > 0 and "state" not in parts
    live = programs["decode"]["memory_gib_per_chip"]["live"]
    assert live == pytest.approx(parts["store"] + parts["next"], abs=2e-3)
    assert one["step_bound_s"] > 0


def test_samplers_share_a_rollout_and_have_the_routes_of_what_is_under_way(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(CONFIG)
    config = evolve(load_config(str(file)), samplers={"address": "trainer:7070"})
    few = evolve(config, rollout={"slots": 16})  # 64 samples: four times the slots
    every, half = (runs_per_step(few.rl, few.rollout, 4, n) for n in (1, 2))
    shared = {"prefill", "insert", "decode"}
    assert {name for name in every if half[name] != every[name]} == shared
    assert all(half[name] == every[name] / 2 for name in shared)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in COMPILER_ALONE.items():
            patch.setenv(name, value)
        step = Step(config, topology_devices("v5p:2x2x1"), sampler=True)
    store = next(x for x in step.programs if x.name == "store")
    assert store.arguments[1] == 80  # 64 slots and a quarter more


def test_one_step_off_the_longer_of_rollout_and_training_bounds_a_step():
    config = load_config("qwen3_30b_a3b_v5p_4x4x4")
    runs = runs_per_step(config.rl, config.rollout, 32)
    seconds = {
        "hand-over": 5.0,
        "prefill": 2.0,
        "decode": 0.01,
        "forward 32768": 1.0,
        "backward 32768": 2.0,
    }
    compiled = [
        CompiledProgram(name, None, 0, {}, Bound(s, 0.0, 0.0), 0.0) for name, s in seconds.items()
    ]
    rollout, training = (
        sum(runs[name] * seconds[name] for name in names)
        for names in (list(seconds)[1:3], list(seconds)[3:])
    )

    def bound(config):
        return Plan("", CHIPS[0], 64, config, {}, compiled, []).step_s

    refused = CompiledProgram("taken", None, -1, {}, None, 0.0)  # not part of the bound
    cut = Plan("", CHIPS[0], 64, config, {}, [*compiled[:3], refused], [])
    assert math.isnan(cut.step_s) and math.isnan(cut.modelled_s)

    def modelled(config):
        clock = CHIPS[0].clock_ghz * 1e9
        programs = [x._replace(cycles=clock * x.bound.flops_s) for x in compiled]
        return Plan("", CHIPS[0], 64, config, {}, programs, []).modelled_s

    off = evolve(config, rl={"one_step_off": True})
    assert modelled(config) == pytest.approx(bound(config))
    assert bound(config) == pytest.approx(5 + rollout + training) and bound(off) == pytest.approx(
        5 + max(rollout, training)
    )


def test_shorter_answers_take_the_micro_batches_and_tokens_that_they_fill():
    """The expected numbers are computed by hand for answers of 1,000 tokens on average: the mean,
    the longest answer's tokens, and one micro-batch of every update with rows as long as its
    longest answer needs.
    """
    config = load_config("qwen3_235b_a22b_v5p_4x8x8")
    rl, rollout = config.rl, config.rollout
    answers = answer_lengths(rl, rollout, 1000)
    assert answers.mean() == pytest.approx(1000, rel=1e-3) and len(answers) == 1024
    longest = runs_per_step(rl, rollout, 256)
    runs = runs_per_step(rl, rollout, 256, 1, answers)
    # two updates of 512 rows that fit 256 rows of 32k: two micro-batches, not four
    assert longest["backward 32768"] == 4 and runs["backward 32768"] == 2
    assert runs["forward 32768"] == 2 + 1 and runs["apply"] == longest["apply"] == 2
    assert longest["decode"] == 30_720 and runs["decode"] == answers.max()
    few = dataclasses.replace(rollout, slots=64)
    assert runs_per_step(rl, few, 256, 1, answers)["decode"] == pytest.approx(answers.sum() / 64)
    assert read_share(rollout) == pytest.approx((2048 + 30_721 / 2) / 32_768)
    seen = sum((2048 + 1 + np.arange(n)).sum() for n in answers) / answers.sum()
    assert read_share(rollout, answers) == pytest.approx(seen / 32_768)


def test_long_prompts_take_as_many_prefills_as_their_rows_need():
    config = load_config("qwen3_30b_a3b_v5p_4x4x4")
    rl, rollout = config.rl, dataclasses.replace(config.rollout, slots=8192)
    assert rollout.prompt_buckets[-1] == 2048  # 64 prompts, of at most 131,072 tokens, at once
    runs = runs_per_step(rl, rollout, 32)
    assert runs["prefill"] == runs["insert"] == rl.prompts_per_step / 64
    fills = rl.prompts_per_step * rl.group_size / config.rollout.slots
    assert runs_per_step(rl, config.rollout, 32)["prefill"] == max(fills, runs["prefill"])


def test_a_round_of_dynamic_sampling_is_rolled_out_whole():
    config = load_config("qwen3_30b_a3b_v5p_4x4x4")
    zero = dataclasses.replace(config.rl.zero_variance, dynamic_sampling=True, dynamic_batch=3)
    rounds = runs_per_step(dataclasses.replace(config.rl, zero_variance=zero), config.rollout, 32)
    single_round = runs_per_step(config.rl, config.rollout, 32)
    assert all(
        rounds[name] == single_round[name] * (3 if name in ("prefill", "insert", "decode") else 1)
        for name in single_round
    )


def test_half_a_row_on_each_device_is_half_the_tokens_of_a_micro_batch():
    config = load_config("qwen3_30b_a3b_v5p_4x4x4")
    change = next(
        x
        for x in advice(config.policy, config.rl, "backward 32768", None, {})
        if x.setting == "mesh.context"
    )
    assert change.value.split() == [
        "2",
        "--mesh.fsdp",
        "16",
        "--rl.micro_batch_tokens",
        str(config.rl.micro_batch_tokens // 2),
    ]


@pytest.mark.slow
def test_one_device_and_a_reference_policy_are_planned(tmp_path):
    alone = [
        x
        for axis in ("fsdp", "expert", "tensor")
        for mesh in ("mesh", "rollout-mesh")
        for x in (f"--{mesh}.{axis}", "1")
    ]
    alone += [*SHORT, "--rl.micro-batch-tokens", "2048"]
    code, report, _ = plan(
        tmp_path, "--topology", "v6e:1x1", *alone, "--rl.objective.kl-coef", "0.01"
    )
    assert code == 0 and report["devices"] == 1 and report["parts_gib_per_chip"]["reference"] > 0
    parts = report["parts_gib_per_chip"]
    assert parts["reference"] == pytest.approx(parts["state"] - parts["moments"], abs=2e-3)
    apply = report["programs"]["apply"]["memory_gib_per_chip"]
    assert apply["live"] == pytest.approx(
        parts["replayed"] + parts["decode"] + parts["reference"], abs=2e-3
    )
    assert all(not program["collectives"] for program in report["programs"].values())


def layouts_of(config, devices):
    """Returns a run for each layout of the search."""
    return [
        dataclasses.replace(config, mesh=policy.mesh, compute=policy.compute, rl=rl)
        for policy, rl in layouts(config.policy, config.rl, devices)
    ]


def test_a_search_looks_at_meshes_that_divide_the_model():
    config = load_config(str(ROOT / "configs" / "qwen3_30b_a3b_v5p_4x4x4.py"))
    candidates = layouts_of(config, 64)
    assert len({(x.mesh, x.compute) for x in candidates}) == len(candidates) > 50
    assert all(x.mesh.devices == 64 and x.validate_for_rl() for x in candidates)
    # four heads of keys and values
    assert {x.mesh.replica for x in candidates} >= {1, 2, 4}
    assert {x.mesh.tensor for x in candidates} == {1, 2, 4}


def test_a_search_yields_what_a_run_accepts():
    """Packed rows are not split over context, and a rollout apart has devices of its own."""
    packed = load_config(str(ROOT / "configs" / "qwen3_235b_a22b_v5p_4x8x8.py"))
    assert packed.rl.packed_row_tokens
    candidates = layouts_of(packed, 256)
    assert candidates and all(x.validate_for_rl() for x in candidates)
    rows = packed.mesh.replica * packed.mesh.fsdp * packed.mesh.expert
    one = dataclasses.replace(packed.rl, micro_batch_tokens=rows * packed.rl.longest_row)
    assert _fewer_tokens(one, packed.mesh) is None
    unpacked = dataclasses.replace(one, packed_row_tokens=0)
    assert _fewer_tokens(unpacked, packed.mesh).setting == "mesh.context"
    config = load_config(str(ROOT / "configs" / "qwen3_30b_a3b_v5p_4x4x4.py"))
    apart = dataclasses.replace(config, rollout_apart=True, rollout_mesh=MeshConfig(expert=16))
    candidates = layouts_of(apart, 64)
    assert candidates and all(x.mesh.devices == 48 and x.validate_for_rl() for x in candidates)


@pytest.fixture(scope="module")
def small_step(tmp_path_factory):
    """Yields the programs of the small configuration for eight v5p devices that are not present,
    with context and replica among the mesh axes.
    """
    file = tmp_path_factory.mktemp("plan") / "small.py"
    file.write_text(CONFIG)
    config = dataclasses.replace(
        load_config(str(file)), mesh=MeshConfig(fsdp=2, expert=2, context=2)
    )
    config = dataclasses.replace(config, rollout_mesh=MeshConfig(replica=2, expert=2, tensor=2))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in COMPILER_ALONE.items():
            patch.setenv(name, value)
        yield Step(config, topology_devices("v5p:2x2x2"))


def test_the_hand_over_never_has_a_whole_layer(small_step):
    """Between the two layouts no device holds a full layer's matrices of experts or of attention,
    nor the full embedding or head.
    """
    program = small_step.programs[0]
    assert program.name == "hand-over"
    shapes = [
        tuple(map(int, dims.split(",")))
        for dims in re.findall(
            r" = [a-z]+\d+\w*\[([\d,]+)\]", program.lower({}).compile().as_text()
        )
    ]
    model = small_step.config.model
    full_matrices = [
        (model.moe.experts, model.hidden, model.moe.ffn),
        (model.hidden, model.heads * model.head_dim),
        (model.vocab_size, model.hidden),
    ]
    # stacks of several layers do occur
    assert len([shape for shape in shapes if shape[0] == model.layers]) > 20
    for matrix in full_matrices:
        assert not [shape for shape in shapes if sorted(shape[-len(matrix) :]) == sorted(matrix)]
