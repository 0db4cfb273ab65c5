"""Benchmarks against the software that a user would pick instead: `python -m benchmarks.train`,
`python -m benchmarks.rollout`.
"""
