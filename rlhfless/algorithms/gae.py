"""Generalised advantage estimation (arXiv 1506.02438, eq. 16), over the tokens that the model drew.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}

The step after a drawn token is the next drawn token: values and advantages are carried through an environment's tokens
unchanged, because the model decides nothing there. After the last drawn token V and A are 0.
"""

from __future__ import annotations

import numpy as np

from rlhfless.algorithms.kl import FloatLike
from rlhfless.records import IntArray


def gae(
    rewards: FloatLike, values: FloatLike, lengths: IntArray, gamma: float, lambda_: FloatLike | float
) -> FloatLike:
    """Advantages `[drawn tokens]` in float64.

    `rewards` and `values` are `[drawn tokens]`, sequence after sequence; `lengths` [sequences] are the drawn tokens of
    each, and `lambda_` is one number, or `[sequences]`.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[longest_first]
    discount = gamma * np.broadcast_to(np.asarray(lambda_, dtype=np.float64), lengths.shape)[longest_first]
    # Backwards, all sequences at once: k tokens before their ends, those that are longer than k are the first of them.
    longer = np.searchsorted(-lengths[longest_first], -np.arange(int(lengths.max(initial=0))))
    advantages = np.zeros(len(rewards))
    next_values = next_advantages = np.zeros(len(lengths))
    for k, count in enumerate(longer):
        at = last[:count] - k
        delta = rewards[at] + gamma * next_values[:count] - values[at]
        next_advantages = delta + discount[:count] * next_advantages[:count]
        next_values = values[at].astype(np.float64)
        advantages[at] = next_advantages
    return advantages
