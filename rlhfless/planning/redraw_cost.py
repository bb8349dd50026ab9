"""What a step draws beyond what it learns: redraws, and groups that are left out.

With s, the share of groups whose samples differ in their rewards, and n samples of each of P prompts:

    dynamic sampling (`max_redraws`)    P / s groups are drawn, at most P (1 + max_redraws), and P learned
    `leave_out_without_signal`          P groups are drawn, and s P learned

s is that of an earlier run; without one it is taken to be 1. Redraws are counted as if they were drawn at once: in a
run each waits for the longest response of the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from rlhfless.records.traces import Trace
from rlhfless.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Drawn:
    """The samples of a step."""

    prompts: int
    samples: int
    """Of each prompt."""
    learned_share: float
    """The share of them that is learned."""

    @classmethod
    def of(cls, spec: RunSpec, signal: float | None) -> Drawn:
        """`signal`: s, if it is known."""
        prompts, samples, needs = spec.prompts_per_step, spec.samples_per_prompt, spec.algorithm.needs
        share = 1.0 if signal is None else max(signal, 1 / prompts)  # a step learns at least one group
        if needs.redraws:
            drawn = min(math.ceil(prompts / share), prompts * (1 + needs.redraws))
            return cls(drawn, samples, min(share, prompts / drawn))
        return cls(prompts, samples, share if needs.signal_only else 1.0)

    @property
    def learned_samples(self) -> float:
        return self.prompts * self.samples * self.learned_share


def signal_of(trace: Trace | None) -> float | None:
    """The share of a run's groups with a signal; None if nothing says so."""
    shares = [record.metrics.get("groups_without_signal") for record in trace.steps] if trace is not None else []
    known = [share for share in shares if share is not None]
    return 1 - fmean(known) if known else None
