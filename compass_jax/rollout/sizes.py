"""The argument shapes of the engine's programs. Each further shape needs another compilation, so
the batcher and the list of programs use only these. Pure functions of the configuration.
"""

from __future__ import annotations

from compass_jax.config import RolloutConfig

# A prefill has a separate cache, which every device of a mesh briefly holds entirely: with
# one sample of each prompt it would be as large as the slots'.
PREFILL_TOKENS = 131_072
LEAST_NEW = 16  # tokens of an extension, padded


def share(config: RolloutConfig) -> int:
    """Returns an eighth of the slots: the number of samples that are resumed together, and of those
    whose routes are copied together.
    """
    return max(1, config.slots // 8)


def prefill_rows(config: RolloutConfig, samples: int, bucket: int) -> list[int]:
    """Returns the numbers of prompts of `bucket` tokens in a prefill for `samples` of each,
    ascending: enough to fill all slots, or an eighth of them, up to PREFILL_TOKENS.
    """
    most = max(1, PREFILL_TOKENS // bucket)
    return sorted({min(-(-slots // samples), most) for slots in (config.slots, share(config))})


def resume_rows(config: RolloutConfig) -> list[int]:
    """Returns the numbers of samples that a prefill resumes, ascending."""
    return sorted({1, share(config)})


def resume_buckets(config: RolloutConfig) -> list[int]:
    """Returns the lengths to which resumed samples are padded, ascending: the prompt buckets, and
    the longest of them doubled until it holds every sequence.
    """
    sizes = list(config.prompt_buckets)
    while sizes[-1] < config.max_length:
        sizes.append(min(2 * sizes[-1], config.max_length))
    return sizes


def extension_sizes(config: RolloutConfig, bucket: int) -> list[int]:
    """Returns the numbers to which the new tokens of a sequence of `bucket` padded tokens are
    padded, ascending, where a slot holds its keys. All are less than the bucket: attention takes a
    cache as long as its tokens for a sequence that begins with them.
    """
    sizes = [LEAST_NEW * 4**i for i in range(16)]
    return [size for size in sizes if size < bucket and size <= config.prefill_chunk]


def prompt_bucket(config: RolloutConfig, length: int) -> int:
    """Returns the smallest prompt bucket that holds `length` tokens. Raises ValueError beyond the
    longest.
    """
    for size in config.prompt_buckets:
        if length <= size:
            return size
    raise ValueError(
        f"a prompt of {length} tokens exceeds the longest bucket of rollout.prompt_buckets"
        f" {config.prompt_buckets}"
    )


def resume_bucket(config: RolloutConfig, length: int) -> int:
    """Returns the padded length of a resumed sample of `length` tokens."""
    return next(size for size in resume_buckets(config) if size >= length)


def reads(config: RolloutConfig) -> list[int]:
    """Returns the numbers of cache positions that `generate` may read, ascending."""
    return list(range(config.cache_bucket, config.max_length + 1, config.cache_bucket))
