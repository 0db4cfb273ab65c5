"""The built-in verifiers. Each module has a KIND, or KINDS by name.

Reward workers import all modules, so they must not import jax. Large packages (math-verify, sympy,
jsonschema) are imported by the functions that need them.
"""
