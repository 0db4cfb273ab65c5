"""Equality of mathematical answers: notation, expressions, units, typed values, comparison.

Reward workers import these modules: nothing here may import jax, and nothing evaluates an answer
as a program.
"""
