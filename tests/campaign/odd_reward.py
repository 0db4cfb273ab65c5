"""A reward that an untrained model gets for half of its responses."""


def odd(response: str) -> float:
    """Returns 1 for an odd number of bytes, else 0."""
    return float(len(response.encode()) % 2)
