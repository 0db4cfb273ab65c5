"""Stub."""

SHARE = 0
