"""State that is JSON with arrays in it: what a checkpoint keeps, and what a hook gets back."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.training.hooks.own import _OwnHook
from compass_jax.weights.state import MARK, joined, shapes, split

STATE = {
    "of": {"mean": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": 4},
    "rows": [1, [np.array([], np.int32), "text", None]],
    "routes": jnp.full((2, 1), 7, jnp.uint8),
}


def test_arrays_leave_the_json_and_come_back_to_their_places():
    plain, arrays = split(STATE)
    again = json.loads(json.dumps(plain))
    assert again == plain and set(arrays) == {"of.mean", "rows.1.0", "routes"}
    assert {name: (x.shape, x.dtype) for name, x in shapes(again).items()} == {
        name: (x.shape, x.dtype) for name, x in arrays.items()
    }
    back = joined(again, arrays)
    np.testing.assert_array_equal(back["of"]["mean"], STATE["of"]["mean"])
    np.testing.assert_array_equal(back["routes"], STATE["routes"])
    assert back["rows"][1][1:] == ["text", None] and back["of"]["steps"] == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": np.zeros(2)}, r"^a: a checkpoint would keep this float64 array as float32"),
        ({"a": [{MARK: "b"}]}, r"^a\.0: a state must not have the key"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        split(value)


def test_a_hook_can_write_to_the_arrays_that_a_checkpoint_gives_back():
    hook = _OwnHook(None, "mine")
    hook.restore(joined(*split(STATE)), 3)
    mean = hook.state()["of"]["mean"]
    mean += 1  # an array of JAX could not be written to
    np.testing.assert_array_equal(hook.state()["of"]["mean"], STATE["of"]["mean"] + 1)
    assert list(hook.state()) == list(STATE)
