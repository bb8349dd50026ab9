"""What a probe that is off means for a load, where the layers were read back and where they were not."""

from __future__ import annotations

import math

import pytest

from rlhfless.functions.generation.deployment import _read_back_decides
from rlhfless.functions.generation.engine import LoadReport
from rlhfless.records import Probe, PublishedWeights, WeightVersion
from rlhfless.weights.check import WeightCheckFailed, check_probe

VERSION = WeightVersion("run", 1, 2, "d")
PUBLISHED = PublishedWeights(VERSION, "here", 10, 3, Probe((1, 2), (-1.0,)))


def load_of(read_back: int, logprob: float) -> None:
    """A load with so many of three tensors read back, after which the engine gives a logprob for the probe's token."""
    with _read_back_decides(LoadReport("d", 3, read_back, 10, 0.1), PUBLISHED, [logprob], 0.5):
        check_probe(VERSION, PUBLISHED.probe, [logprob], tolerance=0.5)


def test_rounding_of_an_engine_with_the_right_weights_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    load_of(3, -1.7)
    assert "logprobs: -1 and -1.7 of token 2. Every tensor was read back" in caplog.text


@pytest.mark.parametrize(
    ("read_back", "logprob"),
    [
        (2, -1.7),  # the third tensor may be wrong
        (3, math.nan),
        (3, -3.0),  # too far for rounding: the engine computes something else
    ],
)
def test_all_else_stops_the_run(read_back: int, logprob: float) -> None:
    with pytest.raises(WeightCheckFailed) as failed:
        load_of(read_back, logprob)
    assert failed.value.check == "probe"
