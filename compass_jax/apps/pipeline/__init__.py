"""Pipelines: stages that run one after another, each in a separate process."""
