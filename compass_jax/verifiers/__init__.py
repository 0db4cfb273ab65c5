"""Judging of one answer: the verifiers that have a name (`kinds/`), and their readers.

The configuration stands above this folder: it asks each verifier for its arguments and its smallest
gap. The workers of rewards/ run all of it, so nothing here may import jax.
"""
