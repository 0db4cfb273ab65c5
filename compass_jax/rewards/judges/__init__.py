"""Judges: models that compare an answer with an anchor, their verdicts, and the endpoint that they
are asked through.
"""
