"""The responses of a step, with their predicted lengths, and the list that a plan cuts into groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhfless.prefixes.tree import PrefixTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Responses:
    """The samples that a step has to generate; made by `responses`."""

    tokens: Floats
    """[samples]: predicted response tokens, the prompt not counted."""
    prompt: Ints
    """[samples]: index of the prompt; siblings share one."""
    prompt_tokens: Floats
    """[prompts]."""
    order: Ints | None = None
    """[samples]: the list to cut, from short to long as far as is known, siblings side by side. For lengths that
    stand for distributions: then it is not known which sibling is the long one, so no group may depend on it."""
    longest: Floats | None = None
    """[samples], in that order, ascending: the assumed length of a group that ends with this sample; by default its
    longest sample."""
    prefixes: PrefixTree | None = None
    """What the prompts share: an actor prefills a shared prefix once for all its prompts. None: nothing is known."""

    @property
    def tree(self) -> PrefixTree:
        """`prefixes`, which may be nothing."""
        return PrefixTree.nothing(self.prompt_tokens.size) if self.prefixes is None else self.prefixes


def responses(
    tokens: ArrayLike, prompt: ArrayLike, prompt_tokens: ArrayLike, prefixes: PrefixTree | None = None
) -> Responses:
    """Checks and converts: `tokens` [samples], `prompt` [samples], `prompt_tokens` [prompts], `prefixes` of them.

    Raises ValueError that names the argument, the value and the hint.
    """
    lengths, index = np.asarray(tokens, float), np.asarray(prompt, np.int64)
    prompts = np.asarray(prompt_tokens, float)
    if lengths.ndim != 1 or lengths.size == 0:
        raise ValueError(f"tokens has the shape {lengths.shape}; give one predicted length per sample, at least one")
    if index.shape != lengths.shape:
        raise ValueError(f"prompt has the shape {index.shape} and tokens {lengths.shape}; give one prompt per sample")
    if not (np.isfinite(lengths).all() and (lengths >= 1).all()):
        raise ValueError(f"tokens has a value of {lengths.min()}; a response has 1 token or more, finitely many")
    if prompts.ndim != 1 or index.min() < 0 or index.max() >= prompts.size:
        raise ValueError(f"prompt has an index outside prompt_tokens, which has the shape {prompts.shape}")
    if not (np.isfinite(prompts).all() and (prompts >= 0).all()):
        raise ValueError("prompt_tokens has a value that is negative or not finite")
    if prefixes is not None and (prefixes.leaf.size != prompts.size or (prefixes.shared_tokens > prompts).any()):
        raise ValueError(f"prefixes are of {prefixes.leaf.size} prompts, or longer than these {prompts.size}")
    return Responses(lengths, index, prompts, prefixes=prefixes)


def order_of(step: Responses) -> Ints:
    """[samples]: the list that is cut into groups, from short to long; samples of equal lengths by their prompts."""
    return np.lexsort((step.prompt, step.tokens)) if step.order is None else step.order
