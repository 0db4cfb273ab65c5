"""Equality of mathematical answers: notation, expressions, units, typed values, comparison.

Reward workers import these modules, so they must not import jax. No answer is evaluated as a
program.
"""
