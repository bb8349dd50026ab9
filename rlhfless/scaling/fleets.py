"""Fleets of runs that share generation actors (`placement.share: adapters`): which settings must be equal.

Runs share an engine if they would start the same one, apart from the names of their versions. A slot of an engine takes
its largest rank whatever the adapter's rank is, so ranks are rounded up, and runs of smaller ranks share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rlhfless.scaling.memory import stored_versions
from rlhfless.spec import RunSpec
from rlhfless.spec.document import dotted, walk

SMALLEST_RANK = 32
"""Rank of the slots for adapters of this rank and below."""

SHORTEST_TOKENS = 4096
"""Fewest tokens of the longest sequence, where the model's context allows it. Longer ones are rounded up to a power of
two, so that runs with prompts of other lengths can join."""

EQUAL = (
    "model.path",
    "model.tokenizer",
    "model.dtype",
    "model.trust_remote_code",
    "model.max_context_tokens",
    "model.lora.targets",
    "generation.batch_invariant",
    "generation.quantization",
    "generation.speculation",
    "generation.engine",
    "placement.kind",
    "placement.tenants",
)
"""Keys, and sections, that are equal in all runs of a fleet."""

RANK, VERSIONS, TOKENS = "model.lora.rank", "schedule.max_staleness", "generation.max_tokens"

Terms = Mapping[str, Any]
"""By dotted key: what is equal in all runs of a fleet."""


def shared_rank(rank: int) -> int:
    """Return the rank of the slots of an engine for adapters of a rank."""
    return max(rank, SMALLEST_RANK)


def shared_tokens(longest: int, context: int | None) -> int:
    """Return the longest sequence of an engine for a run's longest one, given the model's context if it is known."""
    rounded = max(SHORTEST_TOKENS, 1 << (longest - 1).bit_length())
    return max(min(rounded, context or rounded), longest)


def terms_of(spec: RunSpec, longest_tokens: int | None = None) -> Terms:
    """Return the terms of a run's fleet. `longest_tokens`: see `shared_tokens`; None: not known yet."""
    assert spec.model.lora is not None, "a run of a fleet trains an adapter"
    values = {
        dotted(path): value
        for path, value in walk(spec.model_dump(mode="json"))
        if not (isinstance(value, dict | list) and value)
    }
    equal = {key: value for key, value in values.items() if any(f"{key}.".startswith(f"{each}.") for each in EQUAL)}
    terms = equal | {RANK: shared_rank(spec.model.lora.rank), VERSIONS: stored_versions(spec)}
    return terms if longest_tokens is None else terms | {TOKENS: longest_tokens}


def fleet_key(terms: Terms) -> str:
    """Return the name of a fleet, which is equal for equal terms."""
    return hashlib.blake2b(repr(sorted(terms.items())).encode(), digest_size=4).hexdigest()


def difference(mine: Terms, theirs: Terms) -> str:
    """Return what two runs differ in, as text; empty if they can share."""
    what = {RANK: "slots of rank", VERSIONS: "weight versions at the same time:", TOKENS: "sequences of up to"}
    found = [
        f"{key} ({what.get(key, '')} {mine.get(key)}, and {theirs.get(key)} in the fleet)".replace("( ", "(")
        for key in dict.fromkeys((*theirs, *mine))
        if mine.get(key) != theirs.get(key)
    ]
    return "; ".join(found)
