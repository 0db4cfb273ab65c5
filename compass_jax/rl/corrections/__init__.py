"""Corrections of the mismatch between rollout and training, one file each. Adding one is adding a
file with a frozen subclass of `compass_jax.config.Correction`, here or anywhere (`rl.correction`
takes module:Class).
"""
