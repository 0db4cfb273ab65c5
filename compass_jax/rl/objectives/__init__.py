"""Policy objectives, one file each. Adding one is adding a file with a frozen subclass of
`compass_jax.config.Objective`, here or anywhere (`rl.objective` takes module:Class).
"""
