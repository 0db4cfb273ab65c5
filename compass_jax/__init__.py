"""Reinforcement learning for mixture-of-experts language models on TPUs (system of arXiv
2512.07710).
"""

__version__ = "0.1.0"
