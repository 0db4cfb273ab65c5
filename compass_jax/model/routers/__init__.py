"""Routers, one file each. Adding one is adding a file with a frozen subclass of
`compass_jax.config.Router`, here or anywhere (`model.moe.router` takes module:Class or
file.py:Class).
"""
