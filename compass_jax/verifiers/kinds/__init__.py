"""The verifiers that have a name: KIND of each file of this folder, or its KINDS by name.

Reward workers import all of them: nothing here may import jax. What is large (math-verify, sympy,
jsonschema) is imported by the function that needs it.
"""
