"""Checkpoints: bit for bit, either complete or ignored, and refused for another model."""

import resource
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract import abstract_like
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.weights import checkpoint
from compass_jax.weights.checkpoint import CheckpointError, CheckpointMismatch

MODEL = ModelConfig(
    "qwen3_moe", 100, 32, 2, 2, 1, 16, 64, moe=MoEConfig(8, 2, 32, dense_layers=(1,))
)
META = {
    "stream": {"next": 12, "seed": 2**60},
    "visits": {"17": 3},
    "text": "ü",
    "share": 0.1,
    "none": None,
}


class State(NamedTuple):
    params: dict
    opt_state: tuple
    step: jax.Array


def tree(seed=0):
    bits = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(bits.normal(size=(16, 8)), jnp.bfloat16),
        "odd": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32),
        "f": jnp.asarray(bits.normal(size=(16, 24)), jnp.float32),
    }
    opt = (None, {"count": jnp.int32(3)}, jnp.zeros((0, 4), jnp.uint8))
    return {
        "state": State(params, opt, jnp.int32(seed)),
        "rng": jax.random.key_data(jax.random.key(seed)),
        "routing": jnp.asarray(bits.integers(0, 256, (5, 3, 2)), jnp.uint8),
    }


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and x.shape == y.shape, path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def save(path, step, keep=2, arrays=None):
    return checkpoint.save(
        path,
        step,
        tree(step) if arrays is None else arrays,
        META | {"step": step},
        model=MODEL,
        keep=keep,
    )


def restore(path, step=None, arrays=None):
    return checkpoint.restore(
        path, abstract_like(tree() if arrays is None else arrays), step, model=MODEL
    )


def names(path):
    return sorted(p.name for p in (path / "checkpoints").iterdir())


def test_round_trip_is_bit_for_bit(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (3, 7, 12):
        path = save(tmp_path, step)
    assert checkpoint.latest(tmp_path) == 12 and path.name == "step_00000012"
    assert names(tmp_path) == ["step_00000007", "step_00000012"]
    step, arrays, meta = restore(tmp_path)
    assert step == 12 and meta == META | {"step": 12}
    assert_same_bits(arrays, tree(12))
    assert_same_bits(restore(tmp_path, 7)[1], tree(7))
    assert_same_bits(restore(path)[1], tree(12))  # a checkpoint's own directory
    # no sharding given: the first device
    assert_same_bits(restore(tmp_path, arrays=jax.eval_shape(tree))[1], tree(12))


def test_a_program_that_a_fresh_start_compiled_takes_what_is_restored(tmp_path):
    """Restored arrays are not committed to a device, since that would compile every program a
    second time.
    """
    initial, compiled = tree(1), []
    listen = lambda event, _s, **_: compiled.append(event)  # noqa: E731
    program = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state))
    jax.block_until_ready(program(initial["state"].params))
    save(tmp_path, 1)
    restored = restore(tmp_path, arrays=jax.eval_shape(tree))[1]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(program(restored["state"].params))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in compiled if "backend_compile" in event]


def test_float64_round_trip(tmp_path, x64):
    arrays = {"x": jnp.asarray([1 / 3, 1e-300], jnp.float64), "n": jnp.asarray([2**62], jnp.int64)}
    save(tmp_path, 1, arrays=arrays)
    assert_same_bits(restore(tmp_path, arrays=arrays)[1], arrays)


def test_another_mesh_is_welcome(tmp_path):
    def sharded(shape, spec, axes=("a", "b")):
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2)
        return NamedSharding(mesh, PartitionSpec(*spec))

    arrays = {
        "w": jax.device_put(tree()["state"].params["f"], sharded((4, 2), ("a", "b"))),
        "s": jnp.int32(1),
    }
    save(tmp_path, 1, arrays=arrays)
    target = sharded((2, 4), ("b", "a"))
    targets = {
        "w": jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=target),
        "s": jax.ShapeDtypeStruct((), jnp.int32),
    }
    _, back, _ = restore(tmp_path, arrays=targets)
    assert back["w"].sharding == target and {
        s.data.shape for s in back["w"].addressable_shards
    } == {(4, 12)}
    assert_same_bits(back, arrays)


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 5, arrays=tree(99))
    assert names(tmp_path) == ["step_00000005"]
    assert_same_bits(restore(tmp_path)[1], tree(99))


def test_the_one_just_written_is_kept_beside_newer_ones(tmp_path):
    for step in (5, 6, 2):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_00000002", "step_00000006"]


def test_subset_and_manifest(tmp_path):
    save(tmp_path, 4)
    manifest = checkpoint.read_manifest(tmp_path)
    assert manifest.step == 4 and manifest.model == MODEL
    assert manifest.leaves["state/params/w"] == ((16, 8), "bfloat16") and manifest.leaves[
        "rng"
    ] == ((2,), "uint32")
    state = ("step", "params/w", "params/odd", "params/f", "opt_state/1/count", "opt_state/2")
    assert set(manifest.leaves) == {"rng", "routing", *(f"state/{leaf}" for leaf in state)}
    subset = {"state": {"params": abstract_like(tree()["state"].params)}}
    _, arrays, _ = checkpoint.restore(tmp_path, subset, subset=True)
    assert_same_bits(arrays["state"]["params"], tree(4)["state"].params)
    assert checkpoint.read_meta(tmp_path) == META | {"step": 4}


def change(where, value):
    def apply(arrays):
        arrays["state"].params[where] = value
        return arrays

    return apply


@pytest.mark.parametrize(
    "edit,message",
    [
        (
            change("w", jax.ShapeDtypeStruct((16, 8), jnp.float32)),
            r"w: bfloat16\[16, 8\] in the checkpoint, float32\[16, 8\] asked for",
        ),
        (
            change("w", jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)),
            r"w: bfloat16\[16, 8\] in the checkpoint, bfloat16\[8, 16\] asked for",
        ),
        (
            change("new", jax.ShapeDtypeStruct((2,), jnp.int32)),
            r"new: nothing in the checkpoint, int32\[2\] asked for",
        ),
        (
            lambda arrays: {"state": arrays["state"], "rng": arrays["rng"]},
            r"routing: uint8\[5, 3, 2\] in the checkpoint, not asked for",
        ),
    ],
)
def test_other_arrays_are_refused_by_name(tmp_path, edit, message):
    save(tmp_path, 1)
    with pytest.raises(CheckpointMismatch, match=message):
        checkpoint.restore(tmp_path, edit(abstract_like(tree())))


def test_another_model_is_refused_by_field(tmp_path):
    save(tmp_path, 1)
    other = ModelConfig(
        "qwen3_moe",
        100,
        32,
        2,
        2,
        1,
        16,
        64,
        moe=MoEConfig(8, 4, 32, dense_layers=(0,)),
        rope_theta=1e4,
    )
    with pytest.raises(CheckpointMismatch) as error:
        checkpoint.restore(tmp_path, abstract_like(tree()), model=other)
    message = str(error.value)
    assert (
        "model.moe.top_k: 2 in the checkpoint, 4 asked for" in message
        and "model.moe.dense_layers: (1,)" in message
    )
    assert "model.rope_theta: 1000000.0" in message


def test_what_cannot_be_kept_exactly_is_refused(tmp_path):
    for leaf, kind in ((np.zeros(2), "ndarray float64"), (3, "int"), (jax.random.key(0), "key<")):
        with pytest.raises(CheckpointError, match=f"leaf a/b is .*{kind}"):
            save(tmp_path, 1, arrays={"a": {"b": leaf}})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 1, tree(), {"x": object()}, model=MODEL)
    assert not (tmp_path / "checkpoints").exists()


def test_no_checkpoint_and_a_damaged_one_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        restore(tmp_path)
    where = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; it has 1$"):
        restore(tmp_path, 9)
    (where / "meta.json").write_text("{")
    with pytest.raises(
        CheckpointError,
        match=r"step_00000001 is damaged: meta.json has 1 bytes, 1\d\d were written",
    ):
        restore(tmp_path)
    one = {"x": jnp.arange(1000)}
    where = save(tmp_path, 2, arrays=one)
    for file in (where / "arrays").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(
        CheckpointError,
        match=r"step_00000002 is damaged: arrays/.* has 10 bytes, [\d,]+ were written",
    ):
        restore(where, arrays=one)


def test_a_run_that_may_go_back_keeps_one_checkpoint_that_is_old_enough(tmp_path):
    with checkpoint.Checkpoints(
        tmp_path, MODEL, keep=2, needed_step=lambda step: step - 4
    ) as checkpoints:
        steps = []
        for step in (3, 6, 9, 12, 13):
            checkpoints.save(step, tree(step), META, wait=True)
            steps.append(
                [int(path.name[5:]) for path in sorted(tmp_path.glob("checkpoints/step_*"))]
            )
    # at 12, the newest that is at least 4 steps older is 6; at 13 it is 9
    assert steps == [[3], [3, 6], [3, 6, 9], [6, 9, 12], [9, 12, 13]]
    assert [checkpoint.latest(tmp_path, until) for until in (8, 9, 12, None)] == [None, 9, 12, 13]


def test_arrays_that_cannot_be_written_keep_what_was_there(tmp_path):
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"x": jnp.asarray(np.random.default_rng(0).integers(0, 256, 1_000_000), jnp.uint8)}
    # the kernel refuses larger files, in orbax's own writer
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="step 2 could not be written"):
            save(tmp_path, 2, arrays=noise)
        # a background save's error is raised by the next call
        checkpoints = checkpoint.Checkpoints(tmp_path, MODEL)
        checkpoints.save(2, noise, {})
        with pytest.raises(CheckpointError, match="step 2 could not be written"):
            checkpoints.save(3, noise, {})
        assert names(tmp_path) == ["step_00000001"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with checkpoints:  # later saves succeed once there is room
        checkpoints.save(3, tree(3), {})
    assert names(tmp_path) == ["step_00000001", "step_00000003"]
    assert_same_bits(restore(tmp_path, 1)[1], tree(1))


def test_a_save_in_the_background_has_the_values_of_its_step(tmp_path):
    """While a checkpoint is written, later programs reuse the arrays' memory by donation."""
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jnp.ones((512, 1024))
    with checkpoint.Checkpoints(tmp_path, MODEL, keep=9) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"x": x}, {"at": step})
            x = double(x)
    for step in range(1, 5):
        _, arrays, meta = restore(tmp_path, step, {"x": x})
        assert meta == {"at": step} and (arrays["x"] == 2.0 ** (step - 1)).all()


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_save(tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file lies there")
    with (
        pytest.raises(ValueError, match="of the block"),
        checkpoint.Checkpoints(tmp_path, MODEL) as checkpoints,
    ):
        with pytest.raises(CheckpointError, match="step 1 could not be written"):
            checkpoints.save(1, tree(), {})
        raise ValueError("of the block")
