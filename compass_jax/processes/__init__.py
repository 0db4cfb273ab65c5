"""Child processes: JSON lines over pipes, limits of time and memory, the sandbox, and cleanup of
all descendants when their parent ends.

Reward workers import these modules, so they must not import jax.
"""
