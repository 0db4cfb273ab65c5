"""Step policies, one file each: which prompts are rolled out next, and which groups a step trains
on. Adding one is adding a file with a frozen subclass of `compass_jax.config.StepPolicy`, here or
anywhere (`rl.step_policy` takes module:Class or file.py:Class).
"""
