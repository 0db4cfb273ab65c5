"""Arrays as the shapes, types and shardings that a checkpoint is read into."""

import jax


def abstract_like(arrays):
    """Returns the ShapeDtypeStructs, with shardings, with which `checkpoint.restore` returns
    arrays like these.
    """
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
