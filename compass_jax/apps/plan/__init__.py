"""`compass plan`: an RL step compiled ahead of time for TPUs that are not attached, by the TPU's
compiler; its memory, collectives and bounds.
"""
