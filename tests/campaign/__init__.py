"""A campaign of faults against the commands: `python -m tests.campaign --n 1000 --seed 7`
(docs/campaign.md).
"""
