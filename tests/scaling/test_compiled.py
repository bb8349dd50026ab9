"""Loops as machine code, also where nothing can be kept on disk."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from numba.core import caching

from fakes.places import ROOT
from rlhfless.scaling.compiled import compiled


def total(values: np.ndarray) -> float:
    found = 0.0
    for value in values:
        found += value
    return found


def test_without_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    fast = compiled(total)
    assert fast(np.array([1.0, 2.0, 4.0])) == 7.0
    assert not fast.stats.cache_path
    monkeypatch.undo()
    assert compiled(total).stats.cache_path


RUN = """
import json
from pathlib import Path

from rlhfless.scaling.plan import kernel as plan
from rlhfless.scaling.policies.cost_aware.warm_up import warm_up
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.scenarios import load_scenario


def compiled():
    return {name: len(found.signatures) for name, found in vars(plan).items() if hasattr(found, "signatures")}


warm_up()
before = compiled()
scenario = load_scenario(Path("examples/scenarios/code-7b-mixed.yaml"))
ours = [policy for policy in scenario.policies if policy.shown == "cost_aware"]
compare(scenario.model_copy(update={"seeds": 1, "steps": 3, "policies": tuple(ours)}), jobs=1)
print(json.dumps([before, compiled()]))
"""


def test_nothing_is_compiled_in_a_step() -> None:
    root, command = ROOT, [sys.executable, "-c", RUN]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=True)
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before == after
    assert {name for name, count in before.items() if count} == {"one_s", "take"}
    assert sum(before.values()) == 2
