"""The pieces of the weights that a sampler pulls from each process, and the pulled weights."""

import gc
import itertools
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compass_jax.rollout.remote import weights
from compass_jax.rollout.remote.frames import SamplersError


def sharding(shape, *spec):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y")[: len(shape)]), PartitionSpec(*spec))


SOURCES = {
    "split by two": sharding((2,), "x"),
    "split over two axes": sharding((2, 2), "x", "y"),
    "in four": sharding((4,), "x"),
    "copies": sharding((2, 2), "x"),
    "whole": sharding((1,)),
}
TARGETS = {
    "split by four": sharding((4,), "x"),
    "split by two": sharding((2,), "x"),
    "split over two axes": sharding((2, 2), "x", "y"),
    "columns": sharding((2,), None, "x"),
    "whole": sharding((2,)),
}


def covers(source, target):
    """Returns whether every piece of `target` lies within one of `source`."""
    pieces, needs = (weights.pieces_of(jax.device_put(X, x))[0] for x in (source, target))
    return all(any(weights.contains(piece, need) for piece in pieces) for need in needs)


X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(("source", "target"), [*itertools.product(SOURCES, TARGETS)])
def test_a_sampler_gets_the_weights_in_its_own_layout(source, target):
    tree = {
        "a": jax.device_put(X, SOURCES[source]),
        "b": jax.device_put(jnp.asarray(X, jnp.bfloat16).T, SOURCES[source]),
    }
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=TARGETS[target]), tree
    )
    needs = weights.needs_of(structs, 1)
    if not covers(SOURCES[source], TARGETS[target]):
        with pytest.raises(ValueError, match="no process of the training holds a piece"):
            weights.plan_pulls(needs, weights.pieces_of(tree), 0)
        return
    sent = json.dumps(weights.plan_pulls(needs, weights.pieces_of(tree), 0))
    plan = weights.from_json(json.loads(sent))
    server = weights.WeightServer("127.0.0.1")
    client = weights.WeightClient([server.address], "127.0.0.1")
    server.offer(tree, plan, 1)
    pulled = client.pull(structs, plan, 1)
    server.forget(1, 2, pulled=True)
    for name, x in tree.items():
        assert pulled[name].sharding == TARGETS[target] and pulled[name].dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(pulled[name]), np.asarray(x))


def test_weights_that_a_lost_sampler_did_not_pull_are_released():
    server, x = weights.WeightServer("127.0.0.1"), jax.device_put(X, SOURCES["whole"])
    structs = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=TARGETS["whole"])
    plan = weights.plan_pulls(weights.needs_of(structs, 1), weights.pieces_of(x), 0)
    server.offer(x, plan, 7)
    server.forget(7, 1, pulled=False)
    assert not server._offered
    deleted = weakref.ref(x)
    del x
    gc.collect()
    assert deleted() is None
    # the number can be used a second time
    server.offer(jax.device_put(2 * X, SOURCES["whole"]), plan, 7)
    pulled = weights.WeightClient([server.address], "127.0.0.1").pull(structs, plan, 7)
    np.testing.assert_array_equal(np.asarray(pulled), 2 * X)


def test_weights_that_do_not_come_are_an_error(monkeypatch):
    monkeypatch.setattr(weights, "LEAF_S", 0.2)
    server, x = weights.WeightServer("127.0.0.1"), jax.device_put(X, SOURCES["whole"])
    structs = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=TARGETS["whole"])
    plan = weights.plan_pulls(weights.needs_of(structs, 1), weights.pieces_of(x), 0)
    client = weights.WeightClient([server.address], "127.0.0.1")
    with pytest.raises(SamplersError, match=rf"no weights came from {server.address} within 0.2"):
        client.pull(structs, plan, 3)


def test_samplers_pull_copies_from_different_processes():
    bounds = ((0, 8),)
    pieces = [{bounds: [0, 1, 2]}, {bounds: [2]}]
    needs = [[[bounds], [bounds]]]
    first = [weights.plan_pulls(needs, pieces, n)[0] for n in range(4)]
    assert [[pull.process for pulls in leaves for pull in pulls] for leaves in first] == [
        [0, 2],
        [1, 2],
        [2, 2],
        [0, 2],
    ]
