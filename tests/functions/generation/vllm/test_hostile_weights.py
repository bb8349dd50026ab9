"""Wrong weights that only a look at the weights can tell from right ones: bfloat16, and a learning rate of 1e-6."""

import json
import subprocess
import sys

import pytest

from fakes.repository import ROOT

BENCHMARK = ROOT / "benchmarks" / "hostile_weights.py"
ROUNDING_NATS = 0.02
"""Of the probe's mean, between one honest load of this model and another."""


@pytest.mark.seldom
@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_wrong_weights_are_caught_in_bfloat16_at_the_smallest_learning_rate() -> None:
    """A real learner and a real engine: the benchmark, with few honest loads."""
    arguments = ["--dtypes", "bfloat16", "--heads", "tied", "--rates", "1e-6", "--honest", "8", "--json"]
    done = subprocess.run([sys.executable, BENCHMARK, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    honest, *wrongs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (honest["loads"], honest["alarms"]) == (8, 0)
    assert honest["read_back"] == honest["tensors"]
    assert {row["wrong"]: row["caught"] for row in wrongs} == dict.fromkeys(
        ("stale", "tensor", "scaled", "skipped", "stale head"), "read_back"
    )
    for row in wrongs:  # the probe alone could not have told
        if row["wrong"] in ("stale", "tensor", "stale head"):
            assert row["mean"] < honest["mean"] + ROUNDING_NATS
