"""Stages of a pipeline run one after another, each in a process of its own."""
