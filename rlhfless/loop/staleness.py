"""How far the weights that drew a step's samples were behind the learner's (rlhfless.spec.schedule)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlhfless.records import Experience, VersionSpan, WeightVersion


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of one step, whose samples may be of several versions."""

    oldest: WeightVersion
    """The oldest version of a token."""
    mean: float
    """Over tokens, in versions."""
    most: int

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
    return Staleness(oldest, mean, behind[oldest])


def _tokens_by_version(spans: Iterable[VersionSpan]) -> Mapping[WeightVersion, int]:
    labels: Counter[str] = Counter()
    for span in spans:
        labels[span.version] += span.end - span.start
    return {WeightVersion.parse(label): count for label, count in labels.items() if count}
