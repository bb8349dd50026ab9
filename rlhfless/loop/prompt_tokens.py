"""How many prompt tokens of a step each function computed, beside how many there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rlhfless.prefixes.trie import shared_prefixes
from rlhfless.records import Experience, Invocation, Work
from rlhfless.records.ledger import PREFIX_TOKENS_EVICTED, PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE

ENGINES = frozenset({Work.GENERATE, Work.PRECOMPUTE})
"""Calls that compute prompts, and draw the responses."""

COUNTED = frozenset({*ENGINES, Work.LOGPROBS, Work.LEARN})
"""Calls that compute the prompts of a step, and have the tokens that they did not compute in the ledger."""


def prompt_token_metrics(calls: Iterable[Invocation], drawn: Experience, kept: Experience) -> dict[str, float]:
    """`prompt_tokens_computed` and `prompt_tokens_unique` by function, of the functions with a call; and
    `prefix_tokens_evicted`. `kept` is the part
    of the drawn samples that is trained on."""
    computed: defaultdict[str, int] = defaultdict(int)
    work_of: dict[str, Work] = {}
    evicted = 0
    for call in calls:
        evicted += call.evicted_tokens
        if call.work in COUNTED:
            computed[call.function] += call.input_tokens - call.cached_tokens
            work_of[call.function] = call.work
    unique = {id(given): unique_prompt_tokens(given) for given in (drawn, kept)}
    metrics = {PREFIX_TOKENS_EVICTED: float(evicted)} if ENGINES & set(work_of.values()) else {}
    for function, tokens in computed.items():
        given = kept if work_of[function] is Work.LEARN else drawn
        # All but engines are fed the responses, too, and compute all of their tokens.
        fed = 0 if work_of[function] in ENGINES else sum(sample.model_tokens for sample in given.samples)
        metrics[f"{PROMPT_TOKENS_COMPUTED}/{function}"] = float(tokens - fed)
        metrics[f"{PROMPT_TOKENS_UNIQUE}/{function}"] = float(unique[id(given)])
    return metrics


def unique_prompt_tokens(experience: Experience) -> int:
    """Prompt tokens when each shared prefix is counted once."""
    prompts = [group.prompt.token_ids for group in experience.groups]
    counts = [len(group.samples) for group in experience.groups]
    return shared_prefixes(prompts, counts, last_alone=False).unique_tokens
