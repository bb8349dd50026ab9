"""The tokens that reference and learner compute when each shared prefix is forwarded once per micro-batch, of prompts
of which lengths alone are known: `SharingSequences.cut` (rlhfless.prefixes.packing) without tokens."""

from __future__ import annotations

import numpy as np

from rlhfless.prefixes.packing import PAYS_BELOW
from rlhfless.prefixes.tree import PrefixTree
from rlhfless.records import IntArray


def saved_tokens(
    tree: PrefixTree, prompt_tokens: IntArray, group: IntArray, response_tokens: IntArray, budget_tokens: int
) -> int:
    """Tokens of these samples that are not computed; 0 where sharing does not pay (`PAYS_BELOW`).

    `prompt_tokens` [prompts]; `group` [samples], the prompt of each; `response_tokens` [samples]. A pass is fed all but
    the last token of each sample, and its micro-batches have at most `budget_tokens`.
    """
    if not len(group):
        return 0
    fed = int((prompt_tokens[group] + response_tokens - 1).sum())
    computed = _computed_tokens(tree, prompt_tokens, group, response_tokens, budget_tokens)
    return fed - computed if computed <= PAYS_BELOW * fed else 0


def _computed_tokens(
    tree: PrefixTree, prompt_tokens: IntArray, group: IntArray, response_tokens: IntArray, budget_tokens: int
) -> int:
    own, shared, size = tree.own_tokens.tolist(), tree.shared_tokens.tolist(), prompt_tokens.tolist()
    lineages = {prompt: tuple(tree.lineage(int(tree.leaf[prompt]))) for prompt in np.unique(group).tolist()}
    of_prompt: dict[int, list[int]] = {prompt: [] for prompt in lineages}
    for prompt, tokens in zip(group.tolist(), response_tokens.tolist(), strict=True):
        of_prompt[prompt].append(tokens)
    total = packed = others = 0
    there: set[int] = set()
    for prompt in sorted(lineages, key=lineages.__getitem__):
        has_prompt = False
        for tokens in sorted(of_prompt[prompt], reverse=True):
            added = tokens - 1 if has_prompt else tokens - 1 + size[prompt] - shared[prompt]
            added += sum(own[prefix] for prefix in lineages[prompt] if prefix not in there)
            if packed and max(packed + added, others + tokens) > budget_tokens:
                total, packed, others, there = total + packed, 0, 0, set()
                added = size[prompt] + tokens - 1
            there.update(lineages[prompt])
            packed, others, has_prompt = packed + added, others + tokens, True
    return total + packed
