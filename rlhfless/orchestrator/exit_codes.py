"""Map the error that stopped a run to its exit code, the message to the user, and whether resuming can help.

A run can be resumed only if its folder has a checkpoint or rollouts.
"""

from __future__ import annotations

import errno
import resource
from dataclasses import dataclass
from pathlib import Path

from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.ray_session import NoCluster, NoRay
from rlhfless.fleet.replica import CallTimeout, ReplicaLost
from rlhfless.functions.calls import FunctionBroken, StaleCall
from rlhfless.functions.generation.engine import EngineError
from rlhfless.orchestrator.host import RunPaused
from rlhfless.orchestrator.session import JOURNAL_FILE
from rlhfless.records.checkpoints import CheckpointError, checkpoints_of
from rlhfless.records.journal import StaleAttempt, has_rollouts
from rlhfless.rewards import RewardError
from rlhfless.spec import RunSpec
from rlhfless.util.errors import UserError
from rlhfless.weights.check import WeightCheckFailed, WeightFileError

PROGRAM_FAULT = 1
TO_CORRECT = 2
WRONG_RESULT = 3
MACHINES_FAILED = 4
STOPPED = 5
"""Exit code of a run that has reached a limit of its spec."""

LESS = "Ask for fewer samples (prompts_per_step, samples_per_prompt, prompts.held_out.max_prompts) or for smaller data"

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class RunStopped(UserError):
    """A run has stopped with a message for the user."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text, exit_code)
        self.text = text
        self.status = exit_code

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ending:
    """The consequences of an error for the run that it stopped."""

    exit_code: int
    resume: bool
    """Whether resuming can help."""
    advice: str
    """Text before the command that resumes the run, or advice in place of that command."""


ENDINGS: tuple[tuple[tuple[type[BaseException], ...], Ending], ...] = (
    (
        (WeightCheckFailed,),
        Ending(
            WRONG_RESULT,
            False,
            "the actors did not generate with the weights that the learner published. The same weights would fail the "
            "same check again, so resuming does not help. See `Wrong weights` in docs/faults.md",
        ),
    ),
    (
        (StaleAttempt, StaleCall),
        Ending(TO_CORRECT, False, "another driver has resumed this run; there is nothing to do here"),
    ),
    (
        (RunPaused,),
        Ending(STOPPED, True, "finished work is kept. Raise the limit with `--set`, and resume with"),
    ),
    (
        (RewardError,),
        Ending(TO_CORRECT, True, "once the reward works, or its service is up again, resume with"),
    ),
    (
        (FleetError, ReplicaLost, CallTimeout, FunctionBroken, EngineError, WeightFileError, NoRay),
        Ending(MACHINES_FAILED, True, "finished work is kept. Once the machines are healthy, resume with"),
    ),
    (
        (NoCluster,),
        Ending(TO_CORRECT, True, "finished work is kept. Once the cluster is reachable, resume with"),
    ),
    (
        (MemoryError,),
        Ending(TO_CORRECT, True, "finished work is kept. Once the run needs less memory, resume with"),
    ),
    ((UserError,), Ending(TO_CORRECT, True, "finished work is kept. Once that is corrected, resume with")),
)
"""Endings by error type; the first match applies. An error without an entry is a bug of the program."""

DISK_FULL = Ending(TO_CORRECT, True, "finished work is kept. Free some space, and resume with")
UNEXPECTED = Ending(PROGRAM_FAULT, True, "finished work is kept. If the fault does not recur, this resumes the run")
INTERRUPTED = "stopped; finished work is kept. Resume with"


def ending_of(error: BaseException) -> Ending:
    """Return the ending of a run that this error stopped."""
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return DISK_FULL
    for types, ending in ENDINGS:
        if isinstance(error, types):
            return ending
    return UNEXPECTED


IN_TERMINAL = "Run it again with --debug for the traceback."


def user_message(error: Exception, folder: Path, traceback: str = IN_TERMINAL) -> str:
    """Return the message to the user for an error. `traceback`: where to find the traceback of an unexpected error."""
    ending = ending_of(error)
    if ending is DISK_FULL and isinstance(error, OSError):
        return f"the disk is full: {error.filename or folder} could not be written"
    if isinstance(error, MemoryError):
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        may = "" if limit == resource.RLIM_INFINITY else f" than the {limit / 2**30:.1f} GiB that it may have"
        return f"out of memory: the run's driver needs more{may}. {LESS}"
    if ending is UNEXPECTED:
        return f"unexpected {type(error).__name__}: {error}\n{traceback}"
    if isinstance(error, UserError | WeightCheckFailed):
        return str(error)
    return f"{type(error).__name__}: {error}"


def hint(advice: str, resume: bool, command: str, folder: Path, spec: RunSpec) -> str:
    """Return the last lines of the output of a stopped run, or an empty text. `command` is the one that resumes it."""
    try:
        newest = checkpoints_of(folder, spec.checkpoint).newest()
    except CheckpointError:  # a checkpoint exists but is damaged; the run reports that itself
        return f"{advice}: {command}" if resume else advice
    if newest is not None and newest.notes.step >= spec.steps:
        return f"all {spec.steps} steps are done; the model is in {newest.location}"
    if not resume:
        return advice
    if newest is None and not has_rollouts(folder / JOURNAL_FILE):
        return ""
    return f"{advice}: {command}"
