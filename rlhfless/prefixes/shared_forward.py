"""Count the tokens that reference and learner compute when each micro-batch forwards a shared prefix once.

Only prompt lengths are known: this is `SharingSequences.cut` (rlhfless.prefixes.packing) without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfless.prefixes.packing import ALWAYS, Packing, padded_tokens, pruned
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE, lineage
from rlhfless.records import IntArray


@dataclass(frozen=True, slots=True)
class SharedForward:
    """How reference and learner run forward passes."""

    budget_tokens: int
    """Tokens per micro-batch."""
    packing: Packing = ALWAYS


def saved_tokens(
    tree: PrefixTree, prompt_tokens: IntArray, group: IntArray, response_tokens: IntArray, forward: SharedForward
) -> int:
    """Return the tokens of these samples that are not computed; 0 where packing does not pay.

    `prompt_tokens` [prompts]; `group` [samples], the prompt of each; `response_tokens` [samples]. A pass is fed all
    but the last token of each sample.
    """
    if not len(group):
        return 0
    fed = prompt_tokens[group] + response_tokens - 1
    computed = _computed_tokens(tree, prompt_tokens, group, response_tokens, forward)
    pays = computed < forward.packing.pays_below * padded_tokens(fed, forward.budget_tokens)
    return max(int(fed.sum()) - computed, 0) if pays else 0


def _computed_tokens(
    tree: PrefixTree, prompt_tokens: IntArray, group: IntArray, response_tokens: IntArray, forward: SharedForward
) -> int:
    own, lineages = _kept(tree, prompt_tokens, group, response_tokens, forward)
    depth = [sum(own[prefix] for prefix in lineage) for lineage in lineages]
    order = sorted(range(len(group)), key=lambda i: (lineages[group[i]], -prompt_tokens[group[i]] - response_tokens[i]))
    total = packed = others = 0
    present: set[int] = set()
    for sample in order:
        prompt, tokens = int(group[sample]), int(response_tokens[sample])
        fed = int(prompt_tokens[prompt]) + tokens - 1
        added = fed - depth[prompt] + sum(own[prefix] for prefix in lineages[prompt] if prefix not in present)
        packed, others = packed + added, others + tokens
        if packed > added and max(packed, others) > forward.budget_tokens:
            total, packed, others, present = total + packed - added, fed, tokens, set()
        present.update(lineages[prompt])
    return total + packed


def _kept(
    tree: PrefixTree, prompt_tokens: IntArray, group: IntArray, response_tokens: IntArray, forward: SharedForward
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the prefixes to compute once, including prompts with several samples.

    Returns the tokens of each after its parent, and the prefixes of each prompt, shortest first.
    """
    prompts, prefixes = len(prompt_tokens), len(tree)
    fed = np.bincount(group, prompt_tokens[group] + response_tokens - 1, minlength=prompts).astype(np.int64)
    total = np.append(np.zeros(prefixes, np.int64), fed)
    samples = np.append(np.zeros(prefixes, np.int64), np.bincount(group, minlength=prompts))
    above = np.append(tree.parent, tree.leaf)
    for prefix in range(len(above) - 1, -1, -1):
        if above[prefix] != NONE:
            samples[above[prefix]] += samples[prefix]
            total[above[prefix]] += total[prefix]
    # A prefix with exactly the users of its successor is merged into it.
    alone = np.zeros(len(above), bool)
    below = np.flatnonzero((above != NONE) & (samples > 0))
    alone[above[below[samples[above[below]] == samples[below]]]] = True
    tokens = np.append(tree.tokens, prompt_tokens)
    parent, kept = pruned(tokens, above, np.where(alone, 0, samples), total, forward.packing, forward.budget_tokens)
    own = tokens - np.append(tokens, 0)[parent]
    return own.tolist(), [tuple(lineage(parent, prefix)) for prefix in kept[prefixes:-1].tolist()]
