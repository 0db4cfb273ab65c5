"""Routers, one file each: a frozen subclass of `compass_jax.config.Router`, which has a name in
`config/router.py`. One of a user's own can be anywhere (`model.moe.router` takes module:Class or
file.py:Class).
"""
