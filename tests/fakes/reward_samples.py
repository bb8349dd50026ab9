"""Samples for tests of rewards."""

from rlhfless.records import FinishReason
from rlhfless.rewards import RewardSample


def samples_of(*responses, prompt_id="p-1", **columns):
    """One prompt's samples."""
    return [
        RewardSample("the prompt", text, len(text), FinishReason.LENGTH, columns, prompt_id, index)
        for index, text in enumerate(responses)
    ]
