"""Recorded routes from a checkpoint: every kind of invalid route is refused by row, and routes that
are only unset are accepted.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
from tiny import MODEL, UNSET

from compass_jax.config import MeshConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.weights import recorded
from compass_jax.weights.checkpoint import CheckpointError
from compass_jax.weights.recorded import ENOUGH, check_recorded_routes

LENGTHS = np.array([5, 0, 9, 2], np.int32)  # row 1 had not finished


def store():
    """Returns [4 12 2 2] routes as a rollout leaves them. Row 1 is never read, so its content is
    arbitrary.
    """
    ids = np.argsort(np.random.default_rng(0).random((4, 12, 2, 6)), axis=-1)[..., :2]
    is_input = np.arange(12) < LENGTHS[:, None] - 1
    out = np.where(is_input[..., None, None], ids, UNSET).astype(np.uint8)
    out[1] = 77
    return out


def with_(at, value):
    out = store()
    out[at] = value
    return out


def test_set_and_unset_routes_of_finished_samples_pass():
    check_recorded_routes(LENGTHS, store(), MODEL, "here")
    # that token is routed live
    check_recorded_routes(LENGTHS, with_((2, 3), UNSET), MODEL, "here")
    check_recorded_routes(np.zeros(4, np.int32), store(), MODEL, "here")


@pytest.mark.parametrize(
    ("lengths", "routes", "message"),
    [
        (
            LENGTHS,
            store()[:, :, :1],
            (
                "row 0 (token, layer): shape (4, 1, 2) ends in (layers, k) = (1, 2), the model has"
                " (2, 2)"
            ),
        ),
        (LENGTHS, store()[..., :1], "ends in (layers, k) = (2, 1), the model has (2, 2)"),
        (LENGTHS, store().astype(np.uint16), "dtype uint16, a model of 6 experts records uint8"),
        (LENGTHS, store()[:3], "shape [3, 12, 2, 2], expected [4 t 2 2]"),
        (LENGTHS, store()[:, :, 0], "shape [4, 12, 2], expected [4 t 2 2]"),
        (LENGTHS, store()[:, :8], "row 2 has 9 tokens, the routes are of 8"),
        (-LENGTHS, store(), "row 0 has -5 tokens"),
        (
            LENGTHS,
            with_((2, 7, 1, 0), 6),
            "row 2 (token, layer): an expert id above 5 at index (7, 1)",
        ),
        (
            LENGTHS,
            with_((2, 7, 1), 3),
            "row 2 (token, layer): a repeated expert id at index (7, 1): [3, 3]",
        ),
        (
            LENGTHS,
            with_((0, 3, 0, 1), UNSET),
            "row 0 (token, layer): a partly unset row at index (3, 0)",
        ),
        (
            LENGTHS,
            with_((3, 1, 0), [0, 1]),
            "row 3 has a route at token 1; of 2 tokens only the first 1 were inputs",
        ),
        (
            LENGTHS,
            with_((0, 11, 1, 0), 2),
            "row 0 has a route at token 11; of 5 tokens only the first 4",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_checkpoint_row_and_remedy(lengths, routes, message):
    with pytest.raises(CheckpointError) as caught:
        check_recorded_routes(lengths, routes, MODEL, "runs/x/checkpoints/step_00000003")
    refusal = str(caught.value)
    assert (
        refusal.startswith(
            "runs/x/checkpoints/step_00000003: the routes of its interrupted rollout"
        )
        and message in refusal
    )
    assert re.search(
        r"remove runs/x/checkpoints/step_00000003 to go on from an earlier checkpoint", refusal
    )


def test_captured_zeros_are_refused():
    """Fault 5: with k = 2 the first token already repeats an id. With k = 1 only the full store
    shows the fault, once it has too many equal ids for chance.
    """
    with pytest.raises(
        CheckpointError, match=r"row 0 .*a repeated expert id at index \(0, 0\): \[0, 0\]"
    ):
        check_recorded_routes(LENGTHS, store() * np.uint8(0), MODEL, "here")
    one = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, top_k=1))
    lengths = np.array([ENOUGH // 2 + 1, 0], np.int32)  # times two layers: exactly ENOUGH

    def zeros(width):
        return np.where(
            (np.arange(width) < lengths[:, None] - 1)[..., None, None], 0, UNSET
        ).astype(np.uint8) * np.ones((1, 1, 2, 1), np.uint8)

    with pytest.raises(CheckpointError, match=rf"all {ENOUGH} of them name expert 0"):
        check_recorded_routes(lengths, zeros(20), one, "here")
    other = zeros(20)
    other[0, 4, 1] = 3
    check_recorded_routes(lengths, other, one, "here")
    lengths = np.array([4, 3], np.int32)  # five tokens with one expert may be chance
    check_recorded_routes(lengths, zeros(20), one, "here")


@pytest.mark.parametrize("seed", range(40))
def test_a_row_is_refused_where_the_check_on_the_host_refuses_it(seed):
    """Random rows get random damage. The rows before the first refused one are sound."""
    rng, routes, lengths = np.random.default_rng(seed), store(), LENGTHS.copy()
    for _ in range(rng.integers(0, 4)):
        at = tuple(rng.integers(0, n) for n in routes.shape)
        routes[at] = rng.choice([0, 1, 5, 6, 77, UNSET])
    if rng.random() < 0.3:
        lengths[rng.integers(0, 4)] = rng.choice([-1, 0, 1, 12, 13])
    refused = []
    for row in np.flatnonzero(lengths):
        try:
            recorded._check_row(routes[row], lengths[row], row, MODEL, ValueError)
        except ValueError as error:
            refused.append(str(error))
    try:
        check_recorded_routes(lengths, routes, MODEL, "here")
        assert not refused
    except CheckpointError as error:
        assert refused and refused[0] in str(error)


def test_a_row_on_one_of_several_devices_is_refused():
    """Only the refused row is copied to the host, from the device that has it."""
    placement = Placement(make_mesh(MeshConfig(fsdp=4)), "decode")
    sharding = placement.rows(4)
    check_recorded_routes(LENGTHS, jax.device_put(store(), sharding), MODEL, "here")
    routes = jax.device_put(with_((2, 7, 1, 0), 6), sharding)
    with pytest.raises(CheckpointError, match=r"row 2 \(token, layer\): an expert id above 5"):
        check_recorded_routes(LENGTHS, routes, MODEL, "here")
