"""Batches of SFT conversations: one conversation per padded row, or several packed into a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from compass_jax.data.sft import SFTExample


class Rows(NamedTuple):
    """Conversations in rows of equal length, padded at the end."""

    tokens: Int[np.ndarray, "n t"]
    lengths: Int[np.ndarray, "n"]  # tokens of each row without padding
    learnt: Float[np.ndarray, "n t"]  # loss mask: 1 on the assistant's tokens, else 0
    # 1, 2, ... for a row's conversations, 0 for padding; None: one conversation per row
    segments: Int[np.ndarray, "n t"] | None


def _sequences(examples: Sequence[SFTExample]) -> list[SFTExample]:
    return [sequence for example in examples for sequence in example.sequences()]


def padded(examples: Sequence[SFTExample], longest: int) -> Rows:
    """Returns each sequence of the conversations in a separate row of `longest` tokens."""
    examples = _sequences(examples)
    shape = len(examples), longest
    rows = Rows(
        np.zeros(shape, np.int32),
        np.array([example.size for example in examples], np.int32),
        np.zeros(shape, np.float32),
        None,
    )
    for i, example in enumerate(examples):
        rows.tokens[i, : example.size] = example.tokens
        rows.learnt[i, : example.size] = example.mask
    return rows


def packed(examples: Sequence[SFTExample], longest: int) -> Rows:
    """Packs the conversations' sequences, unsplit, into rows of `longest` tokens with grain's first
    fit, longest first.

    The result is a function of the examples alone, so that the position in a stream remains its
    complete state.
    """
    import grain
    from grain.experimental import FirstFitPackIterDataset

    examples = _sequences(examples)
    ordered = sorted(examples, key=lambda example: -example.size)
    items = [{"tokens": x.tokens, "learnt": x.mask.astype(np.float32)} for x in ordered]
    read_options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    # first fit leaves no two rows that could be merged, which bounds their number
    max_rows = 1 + 2 * sum(example.size for example in examples) // longest
    rows = list(
        FirstFitPackIterDataset(
            grain.MapDataset.source(items).to_iter_dataset(read_options),
            length_struct={"tokens": longest, "learnt": longest},
            num_packing_bins=min(len(items), max_rows),
            shuffle_bins=False,
            meta_features=("learnt",),
        )
    )
    segments = np.stack([row["tokens_segment_ids"] for row in rows])
    return Rows(
        np.stack([row["tokens"] for row in rows]),
        (segments > 0).sum(1, dtype=np.int32),
        np.stack([row["learnt"] for row in rows]),
        segments,
    )
