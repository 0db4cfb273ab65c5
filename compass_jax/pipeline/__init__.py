"""Pipelines: stages that run one after another, each in its own process."""
