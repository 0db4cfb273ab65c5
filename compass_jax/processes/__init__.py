"""Processes that this package starts: JSON lines over pipes, limits of time and memory, the
sandbox, and an end for all descendants when their parent ends.

Reward workers import it: nothing here may import jax.
"""
