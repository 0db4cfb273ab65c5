"""The exchange of rows between devices against numpy, forward and backward, and the arguments that
the TPU's collective receives.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from compass_jax.model.experts import parallel

DEVICES, ROWS, WIDTH = 4, 12, 3


def mesh():
    return Mesh(np.asarray(jax.devices()[:DEVICES]), ("expert",))


def over_devices(function, *arrays):
    """Runs `function` in shard_map, where each device gets its entry of the arrays' first axis."""
    one = lambda *xs: function(*(x[0] for x in xs))[None]  # noqa: E731
    specs = (P("expert"),) * len(arrays)
    return jax.jit(
        jax.shard_map(one, mesh=mesh(), in_specs=specs, out_specs=P("expert"), check_vma=False)
    )(*arrays)


def exchanged(rows, sizes, room):
    """Computes the exchange from its definition: receivers hold the senders' rows, in the senders'
    order.
    """
    out = np.zeros((DEVICES, room, rows.shape[-1]), rows.dtype)
    for j in range(DEVICES):
        sent = [rows[i, sizes[i, :j].sum() : sizes[i, : j + 1].sum()] for i in range(DEVICES)]
        out[j, : sizes[:, j].sum()] = np.concatenate(sent)
    return out


def ragged_all_to_all(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
    axis_index_groups=None,
):
    """Implements jax.lax.ragged_all_to_all from its documentation: device i writes
    operand[input_offsets[j]:][:send_sizes[j]] at output_offsets[j] of device j.
    """
    gathered = [
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    ]
    device, at = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    mismatches = 0
    for i in range(gathered[0].shape[0]):
        rows, starts, counts, places = (x[i] for x in gathered)
        inside = (at >= places[device]) & (at < places[device] + counts[device])
        output = jnp.where(
            inside[:, None],
            jnp.take(rows, starts[device] + at - places[device], axis=0, mode="clip"),
            output,
        )
        mismatches += jnp.where(counts[device] == recv_sizes[i], 0, 1)
    return jnp.where(mismatches == 0, output, jnp.nan)


@pytest.fixture(params=["stand-in", "native"])
def native(request, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    return request.param == "native"


SIZES = {
    "uneven": [[2, 0, 3, 1], [0, 0, 0, 9], [4, 4, 4, 0], [0, 0, 0, 0]],
    "all to one": [[12, 0, 0, 0]] * 4,
    "nothing": [[0, 0, 0, 0]] * 4,
}


@pytest.mark.parametrize("case", SIZES)
def test_rows_arrive_in_the_order_of_their_senders_and_gradients_go_back(native, case):
    rng, sizes, room = np.random.default_rng(0), np.asarray(SIZES[case], np.int32), DEVICES * ROWS
    rows, g = (
        rng.standard_normal((DEVICES, ROWS, WIDTH)).astype(np.float32),
        rng.standard_normal((DEVICES, room, WIDTH)).astype(np.float32),
    )
    everywhere = np.broadcast_to(sizes, (DEVICES, *sizes.shape))
    send = partial(parallel.exchange, room=room, native=native)
    np.testing.assert_array_equal(
        over_devices(lambda x, s: send(x, sizes=s), rows, everywhere), exchanged(rows, sizes, room)
    )
    gradient = over_devices(
        lambda x, s, g: jax.vjp(lambda x: send(x, sizes=s), x)[1](g)[0], rows, everywhere, g
    )
    np.testing.assert_array_equal(gradient, exchanged(g, sizes.T, ROWS))


def test_a_token_goes_once_to_each_device_of_its_experts(native):
    """The experts' work is linear and depends on the expert and the device. Masked tokens, which
    may be NaN, are sent to no device.
    """
    rng, n, k, experts = np.random.default_rng(1), 10, 3, 2
    x = rng.standard_normal((DEVICES, n, WIDTH)).astype(np.float32)
    ids = np.stack(
        [[rng.permutation(DEVICES * experts)[:k] for _ in range(n)] for _ in range(DEVICES)]
    ).astype(np.int32)
    ids[0, 0] = (0, 1, 2)  # two of its experts on one device
    gates, mask = rng.random((DEVICES, n, k)).astype(np.float32), rng.random((DEVICES, n)) < 0.8
    mask[0, 0] = True
    x[~mask], gates[~mask] = np.nan, np.nan

    def work(rows, local_ids, gates, filled):
        scale = jnp.where(
            local_ids < experts,
            gates * (1 + local_ids + experts * jax.lax.axis_index("expert")).astype(gates.dtype),
            0,
        ).sum(1)
        # rows that no device sent must not be sent back
        return jnp.where(filled[:, None], rows * scale[:, None], jnp.nan)

    through = lambda *a: parallel.through_experts(work, *a, experts, native)  # noqa: E731
    out = over_devices(through, x, ids, gates, mask)
    expected = np.where(mask[..., None], x * (gates * (1 + ids)).sum(-1)[..., None], 0)
    np.testing.assert_allclose(out, expected, rtol=1e-6)

    count = lambda *a: jnp.zeros((DEVICES * n, 1)).at[0, 0].set(_arrivals(a, experts, native))  # noqa: E731
    arrived = np.asarray(over_devices(count, x, ids, gates, mask))[:, 0, 0]
    expected_arrivals = [
        sum(
            bool(mask[i, t]) and (ids[i, t] // experts == j).any()
            for i in range(DEVICES)
            for t in range(n)
        )
        for j in range(DEVICES)
    ]
    np.testing.assert_array_equal(arrived, expected_arrivals)


def _arrivals(arguments, experts, native):
    seen = []

    def work(rows, local_ids, gates, filled):
        seen.append(filled.sum())
        return rows

    parallel.through_experts(work, *arguments, experts, native)
    return seen[0].astype(jnp.float32)


def test_a_gather_brings_tokens_choices_and_mask_with_two_collectives():
    """The gather gives every device the arguments of all devices, and no choice for masked tokens,
    which may be NaN. In the token loop of decoding each further collective is a wait in every
    layer.
    """
    rng, n, k = np.random.default_rng(2), 5, 3
    x = rng.standard_normal((DEVICES, n, WIDTH)).astype(np.float32)
    ids = rng.integers(0, 256, (DEVICES, n, k)).astype(np.int32)
    gates, mask = rng.random((DEVICES, n, k)), rng.random((DEVICES, n)) < 0.6
    assert mask.any() and not mask.all()
    gates[~mask] = np.nan
    gates = jnp.asarray(gates, jnp.bfloat16)
    arguments = x, ids, gates, mask

    def side_by_side(*arrays):
        wide = (y.reshape(DEVICES * n, -1).astype(jnp.float32) for y in of_all(*arrays))
        return jnp.concatenate(list(wide), axis=1)

    of_all = parallel.of_all_devices
    gathered = np.asarray(over_devices(side_by_side, *arguments))
    expected = np.concatenate(
        [
            x.reshape(-1, WIDTH),
            np.where(mask[..., None], ids, -1).reshape(-1, k),
            np.where(mask[..., None], gates, 0).astype(np.float32).reshape(-1, k),
            mask.reshape(-1, 1),
        ],
        axis=1,
    )
    for device in gathered:
        np.testing.assert_array_equal(device, expected)
    jaxpr = str(jax.make_jaxpr(partial(over_devices, side_by_side))(*arguments))
    assert jaxpr.count("all_gather[") == 2
