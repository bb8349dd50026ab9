"""Scenario files: a cluster, a model, a workload, a contract and the policies to compare (docs/simulate.md)."""

from rlhfless.sim.scenarios.load import load_scenario
from rlhfless.sim.scenarios.scenario import Scenario

__all__ = ["Scenario", "load_scenario"]
