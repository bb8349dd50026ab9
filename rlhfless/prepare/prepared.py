"""Load the data of a run, and hold the checked inputs from which it starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rlhfless.prepare.examples import load_examples
from rlhfless.prepare.faults import SkippedRows
from rlhfless.prepare.model import PolicyModel, TokenizerInfo
from rlhfless.prepare.prompts import PromptSets, load_prompts
from rlhfless.prepare.rewards import columns_read, unscorable
from rlhfless.records import Prompt
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """The checked inputs from which a run starts."""

    tokenizer: TokenizerInfo
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    max_model_len: int
    """Longest sequence the engine must hold, in tokens: at most the longest prompt + max_tokens."""
    shape: ModelShape | None
    """The policy's sizes, for a first estimate of its speed; None if its config does not have them."""
    warnings: tuple[str, ...]
    skipped: tuple[SkippedRows, ...] = ()
    """See PromptSets."""


def load_sets(spec: RunSpec, policy: PolicyModel) -> PromptSets:
    """Load the run's prompts or examples, training and held out. Raises InputError with the problems of all rows."""
    if spec.supervised:
        return load_examples(spec, policy)
    return load_prompts(
        spec.data,
        policy.tokenizer,
        max_context_tokens=policy.context_tokens,
        seed=spec.seed,
        sizes=spec.sizes,
        read=columns_read(spec.rewards),
        named_sets=spec.evaluation.sets,
        finish=partial(unscorable, spec),
        end_token_ids=policy.end_token_ids,
    )
