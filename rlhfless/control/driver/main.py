"""One attempt of a service run: checks the spec, waits for devices, runs, and reports how the run ended.

The exit is always the last item of the outbox. Only a killed driver leaves none; the service then detects its death and
starts another driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from rlhfless import __version__
from rlhfless.control.delivery import OUT_OF_MEMORY, DriverExit, DriverOrder, OtherProtocol, failure
from rlhfless.control.driver.reporter import Reporter
from rlhfless.control.driver.service_client import Outbox, ServiceClient, StaleOutbox
from rlhfless.control.drivers import read_order
from rlhfless.control.keys import hashed
from rlhfless.control.lifecycle import Status
from rlhfless.control.process_limits import use_reserve
from rlhfless.control.run_files import ALLOWED_FILE, allowed_in, leave_mark
from rlhfless.control.spec_admission import location_problems
from rlhfless.fleet.ray_session import NoCluster
from rlhfless.functions.devices import OutOfMemory
from rlhfless.orchestrator.elastic_host import through_sizes
from rlhfless.orchestrator.exit_codes import MACHINES_FAILED, STOPPED, TO_CORRECT, WRONG_RESULT, ending_of, user_message
from rlhfless.orchestrator.host import RunPaused, StopCause
from rlhfless.orchestrator.resuming import has_begun, hold_inputs
from rlhfless.orchestrator.run_sizes import SIZES_FILE, RunSizes
from rlhfless.orchestrator.session import Session
from rlhfless.planning.host_memory import on_this_node
from rlhfless.planning.preflight import Prepared, preflight
from rlhfless.spec import RunSpec
from rlhfless.spec.base import MOST_SIZES
from rlhfless.spec.errors import InputError, SpecError
from rlhfless.spec.load import SPEC_FILE, load_spec, resolved_yaml
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.logs import RunLog
from rlhfless.telemetry.open_sinks import open_sinks
from rlhfless.util.errors import UserError
from rlhfless.util.signals import Interrupted, OrderlyStop
from rlhfless.util.tasks import is_stopping, to_the_end

log = logging.getLogger(__name__)

DELIVER_S = 10.0
"""Maximum wait at the end until the service has all items. The service reads any remaining items from the outbox."""

ENDED, STALE = 0, 3
"""Exit codes. The outbox records how the run ended."""


def drive(folder: Path, limit: Callable[[float | None], None] = lambda _: None) -> int:
    """Run the order in a run's folder, and return the exit code.

    `limit` limits the process's memory to the order's GiB, if it specifies any.
    """
    try:
        order = read_order(folder)
    except OtherProtocol as error:
        with contextlib.closing(Outbox(folder, error.attempt)) as outbox:  # of the same format in all protocols
            return _pause(outbox, "other_protocol", str(error))
    limit(order.memory_gib)
    run_log = RunLog(folder, order.run_id)
    try:
        with contextlib.closing(Outbox(folder, order.attempt)) as outbox:
            try:
                attempt = _Attempt(order, folder, outbox)
            except (ValidationError, SpecError) as error:
                # Only the service accepts the spec, because the versions differ.
                what = f"this version of rlhfless ({__version__}) in the Ray cluster does not know the run's spec"
                return _pause(outbox, "other_version", f"{what}: {error}")
            stop = OrderlyStop(attempt.spec.timeouts.stop_s, log.info, lambda: None)
            try:
                stop.run(attempt.run())
            except Interrupted as error:
                return error.exit_code
    except StaleOutbox as error:
        log.warning("%s", error)
        return STALE
    finally:
        run_log.close()
    return ENDED


def _pause(outbox: Outbox, code: str, text: str) -> int:
    """Report that the run pauses before it has started, and return the exit code."""
    ended = DriverExit(status=Status.PAUSED, reason=text, error=failure(code, text))
    outbox.add("ended", ended.model_dump(mode="json"))
    return ENDED


class _Attempt:
    def __init__(self, order: DriverOrder, folder: Path, outbox: Outbox) -> None:
        self._order = order
        self._folder = folder
        self._outbox = outbox
        self._called_off: list[StopCause | None] = []
        """Why the service ends the attempt early; an entry of None cancels it for good."""
        self._replaced = ""
        self.spec = self._spec()

    async def run(self) -> None:
        """Run, and deliver how the run ended. Raises CancelledError if a signal stopped it."""
        spec = self.spec
        console = Console("off" if spec.logging.console == "off" else "lines", f"run {self._order.run_id}", spec.steps)
        reporter = Reporter(self._outbox, console, spec.steps, spec.timeouts.devices_s)
        reporter.sizes = RunSizes(self._folder / SIZES_FILE)
        reporter.capacity = self._order.capacity
        leave_mark(self._folder, self._order.attempt, hashed(self._order.token))
        replaced = self._end_replaced
        client = ServiceClient(self._order, self._outbox, reporter.state, reporter.receive, replaced, marked=True)
        work = asyncio.create_task(self._work(spec, reporter, console))
        self._loop, self._task = asyncio.get_running_loop(), work
        reporter.wake, reporter.cancel = client.wake, self._abort_all
        client.start()
        ended = DriverExit(status=Status.QUEUED, reason="stopped with the service; resumes when the service is back")
        try:
            ended = await work
        except asyncio.CancelledError:
            if self._called_off and not is_stopping():
                ended = _called_off(self._called_off[0])
            elif not self._replaced:
                raise
        finally:
            log.info("attempt %d ended: %s: %s", self._order.attempt, ended.status, ended.reason)
            if not self._replaced:
                await to_the_end(reporter.settle())
                reporter.put("ended", **ended.model_dump(mode="json"))
            await asyncio.to_thread(client.close, DELIVER_S)

    def _spec(self) -> RunSpec:
        """Return the POSTed spec on the service's Ray; for a resumed run, the spec as resolved for its devices."""
        own = self._folder / SPEC_FILE
        posted = RunSpec.model_validate(self._order.spec)
        # The sizes of an elastic run are in the POSTed spec; the other is of its last size.
        kept = own.is_file() and posted.placement.size_range is None
        spec = load_spec(own) if kept else posted
        placement = spec.placement.model_copy(update={"ray_address": self._order.ray_address})
        weights = spec.weights
        if self._order.one_machine and weights.transport == "auto":
            weights = weights.model_copy(update={"transport": on_this_node(spec)})
        scoring = spec.scoring.model_copy(update={"http_hosts": tuple(self._order.http_hosts)})
        changes = {"scoring": scoring, "placement": placement, "weights": weights, "limits": posted.limits}
        sizes = spec.sizes.at_most(MOST_SIZES.model_copy(update=self._order.sizes))
        return spec.model_copy(update=changes | {"sizes": sizes, "output": str(self._folder.parent)})

    def _prepare(self, spec: RunSpec) -> Prepared:
        """Check the spec, and check file locations again because links may have changed since the POST. Raises
        InputError."""
        order, runs = self._order, str(self._folder.parent)
        if order.roots is not None:
            problems = location_problems(order.spec, order.roots, runs, hub=order.allow_hub, inside=True)
            if problems:
                raise InputError("the run cannot start", problems)
        return preflight(spec)

    def _abort_all(self, cause: StopCause | None) -> None:
        if not self._called_off:
            self._called_off.append(cause)
            self._task.cancel()

    def _is_resized(self) -> bool:
        """Whether the work was called off for another size alone; then it may go on."""
        if self._called_off != [StopCause.RESIZE] or self._task.uncancel():
            return False
        self._called_off.clear()
        return True

    def _end_replaced(self, why: str) -> None:
        """End this attempt because another driver has the run. Called in the client's thread."""
        log.warning("attempt %d was replaced: %s", self._order.attempt, why)
        self._replaced = why
        self._loop.call_soon_threadsafe(self._task.cancel)

    async def _work(self, spec: RunSpec, reporter: Reporter, console: Console) -> DriverExit:
        """Run to the end, and return how the run ended. Raises StaleOutbox or CancelledError."""
        reporter.status(Status.VALIDATING, "checking model, prompts and rewards")
        sinks = None
        try:
            with reporter.waiting("checking model, prompts and rewards"):
                prepared = await asyncio.to_thread(self._prepare, spec)
                changed = await asyncio.to_thread(hold_inputs, spec, self._folder, allowed_in(self._folder))
            (self._folder / ALLOWED_FILE).unlink(missing_ok=True)
            for warning in changed:
                reporter.put("message", level="warning", message=warning)
            if not (self._folder / SPEC_FILE).exists():
                for warning in prepared.warnings:
                    reporter.put("message", level="warning", message=warning)
                (self._folder / SPEC_FILE).write_text(resolved_yaml(spec), "utf-8")
            reporter.special_tokens = prepared.tokenizer.special_tokens
            sinks = open_sinks(spec, self._folder, self._order.run_id, console, reporter)
            session = Session(
                prepared, self._order.run_id, self._folder, reporter, sinks, reporter, self._order.priority
            )
            outcome = await through_sizes(session, reporter, self._is_resized)
        except StaleOutbox:
            raise
        except RunPaused as error:
            return _paused(error, spec)
        except Exception as error:
            expected = isinstance(error, UserError)  # its message says what to do
            log.error("run stopped: %s: %s", type(error).__name__, error, exc_info=None if expected else error)
            return self._ended_by(error, spec)
        finally:
            if sinks is not None:
                sinks.close()
            console.close()
        reason = f"all {outcome.steps} steps are done; the model is in {outcome.checkpoint}"
        return DriverExit(status=Status.SUCCEEDED, reason=reason)

    def _ended_by(self, error: Exception, spec: RunSpec) -> DriverExit:
        if isinstance(error, MemoryError):
            use_reserve(error)
        text = RAY_AWAY if isinstance(error, NoCluster) else user_message(error, self._folder, IN_LOGS)
        ending = ending_of(error)
        named = error.problems if isinstance(error, InputError | SpecError) else ()
        param = named[0].where if named else error.where if isinstance(error, UserError) else ""
        code = OUT_OF_MEMORY if isinstance(error, MemoryError | OutOfMemory) else CODES.get(ending.exit_code, "failed")
        what = failure(code, text, param, named)
        if ending.exit_code == MACHINES_FAILED or isinstance(error, NoCluster):  # its Ray may be restarting
            return DriverExit(status=Status.QUEUED, reason=text, error=what, retry=True)
        if ending.resume and has_begun(spec, self._folder):
            kept = "samples and checkpoints are kept; correct that, then resume"
            return DriverExit(status=Status.PAUSED, reason=f"{text}; {kept}", error=what)
        return DriverExit(status=Status.FAILED, reason=text, error=what)


IN_LOGS = "The traceback is in the run's logs."

RAY_AWAY = "the service's Ray cannot be reached; the run's logs say why, and its operator can correct it"
"""Reason shown when the cluster cannot be reached. API users did not choose the cluster and cannot start it."""

CODES = {
    TO_CORRECT: "invalid",
    WRONG_RESULT: "wrong_weights",
    MACHINES_FAILED: "machines_failed",
    STOPPED: "limit_reached",
}
"""Error codes by exit code."""


def _called_off(cause: StopCause | None) -> DriverExit:
    if cause is None:
        return DriverExit(status=Status.CANCELLED, reason="cancelled")
    if cause is StopCause.PAUSE:
        return DriverExit(status=Status.PAUSED, reason="paused before its first step")
    return DriverExit(status=Status.QUEUED, reason="yielded to a run of higher priority")


def _paused(error: RunPaused, spec: RunSpec) -> DriverExit:
    if error.cause is StopCause.PAUSE:
        return DriverExit(status=Status.PAUSED, reason=f"paused: {error}")
    if error.cause is StopCause.YIELD:
        return DriverExit(status=Status.QUEUED, reason=f"yielded to a run of higher priority: {error}")
    what = failure("limit_reached", str(error), "limits")
    if spec.limits.then == "stop":
        return DriverExit(status=Status.CANCELLED, reason=f"stopped: {error}", error=what)
    return DriverExit(status=Status.PAUSED, reason=f"paused: {error}; raise it to resume", error=what)
