"""Examples as a batch: what runs that learn from written responses learn from.

A group is an example. Its sequences are neighbours, a chosen response directly before the rejected one, in the whole
batch and in what `select` takes of it pair by pair; the losses of pairs rely on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.algorithms.batch import NO_DENOMINATORS, PackedBatch, own_denominators
from rlhfless.records.examples import Example


def pack_examples(examples: Sequence[Example]) -> PackedBatch:
    """The batch of some examples, in their order. Its `response_mask` is of the tokens that are learned, and its
    rollout logprobs are 0: no engine drew them."""
    sequences = [tokens for example in examples for tokens in example.sequences]
    learned = [example.learned(index) for example in examples for index in range(len(example.sequences))]
    lengths = np.array([len(tokens) for tokens in sequences])
    sizes = np.array([len(example.sequences) for example in examples])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return own_denominators(
        PackedBatch(
            tokens=np.concatenate([np.array(tokens, dtype=np.int64) for tokens in sequences]),
            positions=positions,
            sequence_id=np.repeat(np.arange(len(sequences)), lengths),
            group_id=np.repeat(np.repeat(np.arange(len(examples)), sizes), lengths),
            response_mask=np.concatenate([np.array(mask, dtype=bool) for mask in learned]),
            denominators=NO_DENOMINATORS,
            rollout_logprobs=np.zeros(len(positions), dtype=np.float32),
        )
    )
