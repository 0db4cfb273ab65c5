"""What every room may import: records, errors, names of types, readers of untrusted text.

Reward workers import this room, so only `masked` and `programs` may import jax.
"""
