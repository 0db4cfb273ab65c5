"""Verifiers of single answers: the built-in kinds (`kinds/`) and their parsers.

The configuration imports this package to validate a verifier's arguments and to find its smallest
reward gap. Reward workers run the code, so it must not import jax.
"""
