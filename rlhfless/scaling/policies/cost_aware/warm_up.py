"""Compiles the loops of the plan ahead of the first step, which would otherwise wait for it: 1.1 s of a processor, and
0.25 s where the machine code is on disk already (`scaling.compiled`)."""

from __future__ import annotations

from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.plan import DeviceOption, FleetOptions, Standby, Weighted, plan, responses


def warm_up() -> None:
    """Plans a made-up step, which calls every compiled loop."""
    engine = LinearEngine(fixed_s=0.01, sequence_s=0.001, context_s=0.0, prefill_token_s=1e-5, prefill_context_s=0.0)
    device = DeviceOption("any", engine, 1000, 2, usd_per_s=0.001, standby=(Standby("warm", 2, 0.0),))
    step = responses(tokens=[9.0, 9.0, 5.0, 5.0], prompt=[0, 0, 1, 1], prompt_tokens=[8.0, 8.0])
    plan(step, FleetOptions((device,), max_actors=2), Weighted(0.5))
