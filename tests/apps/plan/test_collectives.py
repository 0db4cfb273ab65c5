"""Bytes of collectives from HLO text: groups, loops, fused forms, and a real program over simulated
devices.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from compass_jax.apps.plan.collectives import collectives, total_bytes
from compass_jax.config import MeshConfig
from compass_jax.devices.sharding import Placement, make_mesh

MIB = 2**20


def entry(*lines, more=""):
    return (
        more
        + "ENTRY %main (p: f32[4]) -> f32[4] {\n"
        + "\n".join("  " + x for x in lines)
        + "\n}\n"
    )


ONE = {
    "gather, list of groups": (
        (
            "%a = bf16[1024,1024]{1,0:T(8,128)} all-gather(%p),"
            " replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
        ),
        1.5,
    ),
    "gather, iota groups": (
        "%a = bf16[1024,1024]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        1.5,
    ),
    "gather, axes of a mesh": (
        (
            "%a = bf16[1024,1024]{1,0} all-gather(%p), replica_groups=mesh['x'=2,'y'=4],"
            " device_ids=([2,4]T(1,0)) {'y'}, dimensions={0}"
        ),
        1.5,
    ),
    "a start has its operands beside the result": (
        (
            "%a = (bf16[256,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%p),"
            " replica_groups=[2,4]<=[8]"
        ),
        1.5,
    ),
    "sum": (
        "%a = f32[1024,1024]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add",
        6.0,
    ),
    "scatter": (
        (
            "%a = f32[256,1024]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0},"
            " to_apply=%add"
        ),
        3.0,
    ),
    "permute": (
        "%a = f8e4m3fn[1024,1024]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
        1.0,
    ),
    "alone": (
        "%a = f32[1024,1024]{1,0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add",
        0.0,
    ),
    "nothing": ("%a = f32[1024,1024]{1,0} add(%p, %p)", 0.0),
}


@pytest.mark.parametrize("name", ONE)
def test_bytes_that_a_device_sends(name):
    line, mib = ONE[name]
    assert total_bytes(collectives(entry(line)).values()) == mib * MIB


@pytest.mark.parametrize(
    ("rows", "room", "mib"), [(512, 2048, 0.75), (2048, 512, 0.75), (2048, 2048, 3.0)]
)
def test_a_ragged_all_to_all_counts_what_even_routing_sends_at_most(rows, room, mib):
    """There are bf16 rows of 2 KiB over four devices, with room for all rows that could arrive."""
    lines = [
        f"%x.1 = bf16[{rows},1024]{{1,0}} fusion(%p), kind=kLoop",
        f"%z = bf16[{room},1024]{{1,0}} broadcast(%p)",
        (
            f"%a = bf16[{room},1024]{{1,0}} ragged-all-to-all(%x.1, %z, %o, %s, %o, /*index=5*/%s),"
            " replica_groups={{0,1,2,3}}"
        ),
    ]
    assert collectives(entry(*lines)) == {"ragged-all-to-all": (1, mib * MIB, 0)}


LOOP = """%cond (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  %n = s32[]{:T(128)} constant(48)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[256,1024]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %f = f32[256,1024]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3
}

%all-reduce-scatter.3 (p: f32[1024,1024]) -> f32[256,1024] {
  %s = f32[1024,1024]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

"""


@pytest.mark.parametrize("how", ["condition", "known", "unknown"])
def test_a_loop_counts_as_often_as_it_runs(how):
    """The trip count comes from a condition that compares with a constant, or from the compiler's
    annotation. Without either the loop counts once.
    """
    text = LOOP if how == "condition" else LOOP.replace("direction=LT", "direction=NE")
    known = ', backend_config={"known_trip_count":{"n":"7"}}' if how == "known" else ""
    counts = collectives(
        entry(
            f"%w = (s32[], /*index=1*/f32[4]) while(%t), condition=%cond, body=%body{known}",
            more=text,
        )
    )
    times = {"condition": 48, "known": 7, "unknown": 1}[how]
    assert {kind: x.count for kind, x in counts.items()} == {
        "all-gather": times,
        "reduce-scatter": times,
    }
    assert (
        counts["all-gather"].bytes == times * 0.75 * MIB
        and counts["reduce-scatter"].bytes == times * 3 * MIB
    )


def test_a_compiled_program_of_a_known_sum():
    """A scan over eight devices sums 4 KiB over four of them 12 times, and one gather of 32 KiB
    follows.
    """
    placement = Placement(make_mesh(MeshConfig(fsdp=2, tensor=4)))

    def local(x):
        x, _ = jax.lax.scan(lambda c, _: (jax.lax.psum(c, "tensor") * 0.1, None), x, length=12)
        return jax.lax.all_gather(x, ("fsdp", "tensor"), tiled=True)

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=placement.mesh,
            in_specs=P(("fsdp", "tensor")),
            out_specs=P(),
            check_vma=False,
        )
    )
    counts = collectives(run.lower(jnp.ones(8 * 1024, jnp.float32)).compile().as_text())
    assert counts["all-reduce"] == (12, 12 * 2 * 4096 * 3 / 4, 0)
    assert counts["all-gather"] == (1, 32768 * 7 / 8, 0)
