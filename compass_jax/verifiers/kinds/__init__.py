"""The verifiers that have a name: each file beside this one whose KIND says what it judges, or
whose KINDS has several by name.

Reward workers import all of them: nothing here may import jax. What is large (math-verify, sympy,
jsonschema) is imported by the function that needs it.
"""
