"""Advantages of whole responses, one file each. Adding one is adding a file with a frozen subclass
of `compass_jax.config.Advantage`, here or anywhere (`rl.advantage` takes module:Class).
"""
