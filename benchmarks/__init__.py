"""Measured side by side with what a user would pick instead: `python -m benchmarks.train`, `python
-m benchmarks.rollout`.
"""
