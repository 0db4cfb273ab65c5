"""The compiler's estimated cycles, summed as often as their operations run."""

import io
import math

import pytest
from evolve import evolve
from rich.console import Console

from benchmarks.pod_programs import with_predecessors
from compass_jax.apps.plan.bound import Bound, kernel_seconds
from compass_jax.apps.plan.cycles import cycles_per_token, estimated_cycles
from compass_jax.apps.plan.memory import Memory
from compass_jax.apps.plan.report import print_plan
from compass_jax.apps.plan.run import CompiledProgram, Plan
from compass_jax.commands.configured import load_config
from compass_jax.devices.chips import CHIPS


def op(name, cycles, scope="moe"):
    return (
        f"  %{name} = f32[4]{{0}} fusion(%p), kind=kLoop, calls=%fused,"
        f' metadata={{op_name="jit(f)/{scope}/mul"}},'
        f' backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


HLO = f"""
%fused (q: f32[4]) -> f32[4] {{
  ROOT %mul = f32[4]{{0}} multiply(%q, %q)
}}

%body (p: f32[4]) -> f32[4] {{
{op("inside", 100)}
}}

%first (p: f32[4]) -> f32[4] {{
{op("balanced", 3)}
}}

%others (p: f32[4]) -> f32[4] {{
{op("more", 7_000_000, "branch_1_fun/overflow")}
  %loop = f32[4]{{0}} while(%p), condition=%condition, body=%body
}}

%condition (p: f32[4]) -> pred[] {{
  ROOT %less = pred[] custom-call(%p), custom_call_target="unknown"
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
{op("once", 20)}
{op("no_estimate", 2**63 - 1)}
  %known = f32[4]{{0}} while(%p), condition=%condition, body=%body, LAYERS
  %c = f32[4]{{0}} conditional(%i, %p, %p), branch_computations={{%first, %others}}
  ROOT %unknown = f32[4]{{0}} while(%known), condition=%condition, body=%body
}}
"""


def test_cycles_of_loops_count_as_often_as_they_run():
    """One loop has 48 turns, and the loop of unknown length counts once. The overflow of experts is
    not counted.
    """
    hlo = HLO.replace("LAYERS", 'backend_config={"known_trip_count":{"n":"48"}}')
    assert estimated_cycles(hlo) == 20 + 49 * 100 + 3


def test_a_decode_program_is_estimated_by_the_token():
    """The work that a call does once is shared by its 64 tokens. The loop over the tokens has no
    known length.
    """
    hlo = HLO.replace("LAYERS", 'backend_config={"known_trip_count":{"n":"48"}}')
    assert cycles_per_token(hlo, 64) == 100 + (20 + 48 * 100 + 3) / 64


@pytest.mark.parametrize(("formula_s", "warns"), [(1.0, True), (1.4, False)])
def test_a_program_far_above_the_formula_is_a_warning(formula_s, warns):
    config, chip = load_config("qwen3_30b_a3b_v5p_4x4x4"), CHIPS[0]
    bound, memory = Bound(formula_s, 0.0, 0.0), Memory(1, 1, 1, 1)
    programs = [
        CompiledProgram(name, memory, 4, {}, bound, 0.0, 2 * chip.clock_ghz * 1e9)
        for name in ("forward 32768", "prepare")
    ]
    console = Console(record=True, width=200, file=io.StringIO())
    print_plan(Plan("v5p:4x4x4", chip, 64, config, {}, programs, []), console)
    text = console.export_text()
    warning = "forward 32768: the compiler estimates 2 s, 2.0 times the 1 s from published peaks"
    assert (warning in text) == warns and "prepare: the compiler" not in text


def test_an_estimate_needs_a_clock():
    program = CompiledProgram("add", None, 0, {}, Bound(0.5, 1.0, 0.25), 0.0, 3.5e9, 4.0)
    assert program.estimated_s(CHIPS[0]) == 2.0
    assert program.modelled_s(CHIPS[0]) == 2.0 + 4.0 + 0.25
    without = CHIPS[0]._replace(clock_ghz=0.0)
    assert program.estimated_s(without) is None and math.isnan(program.modelled_s(without))


def test_kernels_at_the_peaks_by_hand():
    """The 30B model has 48 layers, 32 heads of 128, 4 heads of keys and 8 of 128 experts of 768,
    and runs on 64 chips.
    """
    config, chip = load_config("qwen3_30b_a3b_v5p_4x4x4"), CHIPS[0]
    t, rows = 32_768, 64

    def kernels(name, tokens, config=config, cache=0.0):
        return kernel_seconds(config.policy, chip, name, tokens, cache)

    attention = rows * 48 * 32 * 2 * 128 * t**2  # two products, two operations each, half the pairs
    experts = rows * t * 48 * 8 * 3 * 2 * 2048 * 768
    peak = 64 * 459e12
    assert kernels("forward 32768", rows * t) == pytest.approx((attention + experts) / peak)
    backward = (attention * 7 / 2 + experts * 8 / 3) / peak
    assert kernels("backward 32768", rows * t) == pytest.approx(backward)
    remat = evolve(config, compute={"remat_attention": True})
    assert kernels("backward 32768", rows * t, remat) == pytest.approx(backward + attention / peak)
    # 8-bit experts over 8 x 4 devices, and the part of a cache of 4 GB that tokens attend to
    read = 48 * 128 * 3 * 2048 * 768 / 32
    half = evolve(config, rollout={"prompt_buckets": (1024,), "max_new_tokens": 1024})
    seen = (1025 + 2048) / 2 / 4096  # share of a slot, whose size is a multiple of 4,096
    assert kernels("decode", 1024, half, 4e9) == pytest.approx((read + 4e9 * seen) / 2.765e12)
    assert kernels("apply", 0) == 0


def test_a_program_is_compiled_behind_those_whose_results_it_takes():
    before = {"prepare", "replayed 8192", "forward 8192", "objective 8192"}
    assert with_predecessors(["backward 8192"]) == before | {"backward 8192"}
    assert with_predecessors(["decode", "add"]) == {"hand-over", "slots", "decode", "add"}
