"""Devices and processes: meshes, chips, memory, TPU flags, child processes with limits.

Reward workers import `processes`, so this file imports nothing.
"""
