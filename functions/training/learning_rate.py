"""The learning rate of each update, a function of the spec and the update numbers only."""

from __future__ import annotations

import math

from rlhfless.spec import AdamWSpec


def learning_rate(spec: AdamWSpec, update: int, planned: int) -> float:
    """Return the learning rate of an update, counted from 1, in a run of `planned` updates.

    It grows linearly over `warmup_steps` W. From then on, with p = (update - 1 - W) / (planned - W) in [0, 1] and the
    floor f, it is the learning rate times 1 (`constant`), f + (1 - f) (1 - p) (`linear`), or
    f + (1 - f) (1 + cos(pi p)) / 2 (`cosine`; Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts).
    """
    if update <= spec.warmup_steps:
        return spec.learning_rate * update / spec.warmup_steps
    progress = min((update - 1 - spec.warmup_steps) / max(planned - spec.warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
        spec.rate_schedule
    ]
    floor = spec.rate_floor if spec.rate_schedule != "constant" else 1.0
    return spec.learning_rate * (floor + (1 - floor) * left)
