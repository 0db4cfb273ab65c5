"""Predictions of the pass rates of prompts, one file each (the setting rl.predictor)."""
