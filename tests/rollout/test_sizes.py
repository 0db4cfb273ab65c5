"""The sizes of the engine's programs: every length and every number of samples fits one of them."""

from compass_jax.config import RolloutConfig
from compass_jax.rollout.sizes import prefill_rows, reads, resume_buckets, resume_rows

CONFIG = RolloutConfig(
    slots=20, prompt_buckets=(8, 16), max_new_tokens=50, tokens_per_call=4, cache_bucket=32
)


def test_rows_are_as_many_as_the_slots_or_an_eighth_of_them_take():
    assert prefill_rows(CONFIG, 1, 64) == [2, 20] and prefill_rows(CONFIG, 8, 64) == [1, 3]
    assert prefill_rows(CONFIG, 20, 64) == prefill_rows(CONFIG, 64, 64) == [1]
    # at most 131,072 tokens, as for greedy answers in a pod's evaluation
    assert prefill_rows(CONFIG, 1, 16_384) == [2, 8] and prefill_rows(CONFIG, 1, 200_000) == [1]
    assert resume_rows(CONFIG) == [1, 2]


def test_lengths_go_up_to_the_longest_sequence():
    assert CONFIG.max_length == 96
    assert resume_buckets(CONFIG) == [8, 16, 32, 64, 96] and reads(CONFIG) == [32, 64, 96]
