"""How far the weights that drew a step's samples were behind the learner's (rlhfless.spec.schedule)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.algorithms.base import BY_STALENESS
from rlhfless.algorithms.batch import in_batch_order
from rlhfless.records import Experience, Group, IntArray, Rollout, VersionSpan, WeightVersion


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of one step, whose samples may be of several versions."""

    oldest: WeightVersion
    """The oldest version of a token."""
    mean: float
    """Over tokens, in versions."""
    most: int
    differs: bool
    """Between tokens."""

    @property
    def metrics(self) -> dict[str, float]:
        return {"staleness_mean": self.mean, "staleness_max": float(self.most)}


def staleness_of(experience: Experience, learner: WeightVersion) -> Staleness | None:
    """Of samples that are learned from next, when the learner's weights are the version `learner`. None if their engine
    does not say with which version it drew."""
    tokens = _tokens_by_version(
        span for sample in experience.samples for r in sample.rollouts for span in r.version_spans
    )
    if not tokens:
        return None
    # Versions are numbered by the training steps that they have seen, in all attempts of a run.
    behind = {version: learner.step - version.step for version in tokens}
    mean = sum(behind[version] * count for version, count in tokens.items()) / sum(tokens.values())
    oldest = max(behind, key=lambda version: behind[version])
    return Staleness(oldest, mean, behind[oldest], len({*behind.values()}) > 1)


def by_token(groups: Sequence[Group], learner: WeightVersion) -> IntArray:
    """Versions that the weights of each token were behind `learner`, `[tokens]` in the order of `pack`; 0 on those that
    were given."""
    values = []
    for segment in (each for group in in_batch_order(groups) for sample in group.samples for each in sample.segments):
        values.append(np.zeros(len(segment.token_ids), dtype=np.int64))
        for span in segment.version_spans if isinstance(segment, Rollout) else ():
            values[-1][span.start : span.end] = max(learner.step - WeightVersion.parse(span.version).step, 0)
    return np.concatenate(values)


def split(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, of which those by staleness are means over its tokens; a staleness that no token has is
    left out."""
    found = {}
    for name, value in metrics.items():
        of, _, behind = name.partition(BY_STALENESS)
        share = metrics[f"tokens{BY_STALENESS}{behind}"] if behind else 1.0
        if share:
            found[name] = value if of == "tokens" else value / share
    return found


def _tokens_by_version(spans: Iterable[VersionSpan]) -> Mapping[WeightVersion, int]:
    labels: Counter[str] = Counter()
    for span in spans:
        labels[span.version] += span.end - span.start
    return {WeightVersion.parse(label): count for label, count in labels.items() if count}
