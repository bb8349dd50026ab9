"""The registry: every check, in the order in which they are run. What is cheap, and breaks first, comes first."""

from __future__ import annotations

from rlhfless.selftest import engines, machine, ranks, transport

CHECKS = (
    machine.driver,
    machine.imports,
    machine.compiler,
    machine.caches,
    machine.room,
    transport.weights,
    ranks.ranks_agree,
    ranks.offload,
    ranks.collectives,
    ranks.learner,
    ranks.packing,
    ranks.peak,
    engines.start,
    engines.perturbed,
    engines.probe,
    engines.speed,
    engines.moved,
    engines.restart,
    engines.other_order,
    engines.two_devices,
)
