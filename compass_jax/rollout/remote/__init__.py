"""Disaggregated rollout: samplers in separate processes, on other hosts than the training."""
