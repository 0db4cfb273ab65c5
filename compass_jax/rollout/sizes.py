"""The sizes in which the engine's programs are run: every other one would be compiled anew. The
batcher takes them from here, and so does the list of programs. Pure functions of the configuration.
"""

from __future__ import annotations

from compass_jax.config import RolloutConfig

# The cache of a prefill's prompts lies beside that of the slots, and over a mesh every device has
# all of it for a moment: with one sample of each prompt it would be as large as the slots'.
PREFILL_TOKENS = 131_072


def share(config: RolloutConfig) -> int:
    """An eighth of the slots: samples that go on are prefilled together, and those that have ended
    are fetched together, up to so many.
    """
    return max(1, config.slots // 8)


def prefill_rows(config: RolloutConfig, samples: int, bucket: int) -> list[int]:
    """Prompts of `bucket` tokens in a prefill that serves `samples` of each, ascending: as many as
    fill all slots, or an eighth of them, where that is not too much for one program.
    """
    most = max(1, PREFILL_TOKENS // bucket)
    return sorted({min(-(-slots // samples), most) for slots in (config.slots, share(config))})


def resume_rows(config: RolloutConfig) -> list[int]:
    """Samples of a prefill of those that go on, ascending."""
    return sorted({1, share(config)})


def resume_buckets(config: RolloutConfig) -> list[int]:
    """Lengths to which samples that go on are padded, ascending: those of prompts, and the longest
    of them doubled until it holds every sequence.
    """
    sizes = list(config.prompt_buckets)
    while sizes[-1] < config.max_length:
        sizes.append(min(2 * sizes[-1], config.max_length))
    return sizes


def reads(config: RolloutConfig) -> list[int]:
    """Cache positions that a call of `generate` may read, ascending: whole cache buckets."""
    return list(range(config.cache_bucket, config.max_length + 1, config.cache_bucket))
