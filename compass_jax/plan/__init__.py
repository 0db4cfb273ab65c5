"""`compass plan`: a whole RL step compiled ahead of time for TPUs that are not here, by their own
compiler; its memory, collectives and bounds.
"""
