"""Child processes: JSON over connections, limits of time and memory, the sandbox, and cleanup of
all descendants when their parent ends.

Reward workers import these modules, so they must not import jax.
"""
