"""Versions that the weights of tokens were behind, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.fleet import group
from rlhfless.loop.staleness import staleness_of
from rlhfless.records import Experience, Group, VersionSpan, WeightVersion

LEARNER = WeightVersion("run", 2, 7, "d7")


def drawn(name: str, *spans: tuple[int, int, int]) -> Group:
    """A group of one sample, with spans (step of the version, first token, end)."""
    (rollout,) = group(name).rollouts
    versions = tuple(VersionSpan(f"run/1/{step}/d{step}", start, end) for step, start, end in spans)
    return Group.of(group(name).prompt, [replace(rollout, version_spans=versions)])


def test_the_mean_is_over_tokens_and_the_oldest_one_is_named() -> None:
    """6 tokens 2 versions behind, 3 tokens 1, 1 token 0: 15 / 10. Versions count on in a resumed run."""
    experience = Experience((drawn("p", (5, 0, 6), (6, 6, 8)), drawn("q", (6, 0, 1), (7, 1, 2))))
    staleness = staleness_of(experience, LEARNER)
    assert staleness is not None
    assert staleness.metrics == {"staleness_mean": pytest.approx(1.5), "staleness_max": 2.0}
    assert staleness.oldest == WeightVersion("run", 1, 5, "d5")


def test_an_engine_that_does_not_say_its_version_has_none() -> None:
    assert staleness_of(Experience((group("p"),)), LEARNER) is None
