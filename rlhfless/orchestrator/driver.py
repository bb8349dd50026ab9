"""Drive a run from start to end: start the fleet, publish weights, evaluate, train, checkpoint, stop the fleet.

However a run ends, its functions are stopped, the ledger is written, and the weight store is removed. Lost replicas are
replaced (rlhfless.orchestrator.run_steps). A stopped run leaves a journal and checkpoints to resume from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless.orchestrator import step as rlhf
from rlhfless.orchestrator import supervised
from rlhfless.orchestrator.recovery import Recovered
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.session import Session, open_session
from rlhfless.util.clock import unix_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a finished run."""

    before: Mapping[str, float]
    """Held-out metrics before the first step; empty without held-out prompts."""
    after: Mapping[str, float]
    steps: int
    wall_s: float
    """Seconds of this attempt, plus those in which earlier attempts held devices. The cost covers this time."""
    attempts: int
    checkpoint: str
    """Location of the last checkpoint."""
    best_checkpoint: str
    """Location of the best checkpoint, by `checkpoint.best`."""
    best_by: str
    """The metric, value and step of the best checkpoint."""
    recovered: Recovered
    """Faults and losses of this attempt."""


async def execute(session: Session) -> Outcome:
    """Run one attempt: all steps, or the remaining steps of a resumed run.

    Raises the error that stopped it, such as WeightCheckFailed, RewardError, JournalError, CheckpointError or
    StaleCall. After too many faults in one step, raises the last one (ReplicaLost, CallTimeout, FleetError).
    """
    began_s = unix_s()
    async with open_session(session) as (run, first):
        recovered = await drive_steps(session, run, first, rlhf if isinstance(run, RLRun) else supervised)
    steps = session.spec.steps
    after = {name.removeprefix("eval/"): v for name, v in run.latest.items() if name.startswith("eval/")}
    best = run.checkpoints.best(run.checkpoints.all())
    best_by, last = run.checkpoints.best_by(best), run.checkpoints.location(steps)
    wall_s = run.ledger.earlier_held_s + unix_s() - began_s
    return Outcome(
        run.before, after, steps, wall_s, run.attempt, last, best.location if best else last, best_by, recovered
    )
