"""Writes the items that drivers deliver into the database: each item once, in order of their numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from rlhfless.control import store
from rlhfless.control.database.tables import LeaseRow, MetricsRow, RolloutRow, RunRow, UsageRow
from rlhfless.control.delivery import (
    OUT_OF_MEMORY,
    PROTOCOL,
    DriverExit,
    DriverState,
    Item,
    LeaseWanted,
    Push,
    failure,
    refusal,
)
from rlhfless.control.errors import ApiError
from rlhfless.control.lifecycle import DRIVEN, FOLLOWING, DesiredState, Status

log = logging.getLogger(__name__)

MOST_DEATHS = 5
"""Maximum number of consecutive drivers of a run that end without completing a step and through no fault of the run."""

KEPT_ROLLOUT_STEPS = 100
"""Number of newest steps whose samples can be read. Samples are for people; the trace has the metrics of all
samples."""

KEPT_EVALUATIONS = 50
"""Number of newest evaluations whose samples can be read, in addition to the one before the first step."""

HELD_OUT_PLACE = 10_000
"""RolloutRow.place of an evaluation's first sample. Lower places are samples of the training step."""


def apply(session: Session, run: RunRow, push: Push) -> int:
    """Apply a push, and return the number of the last stored item.

    Raises ApiError (409) for a replaced driver, and for a gap before the items.
    """
    if push.attempt != run.attempt:
        message = f"attempt {push.attempt} of {run.id} has been replaced by attempt {run.attempt}; this driver must end"
        raise ApiError(409, "stale_attempt", message)
    apply_items(session, run, push.items)
    _update_state(session, run, push.now)
    return run.pushed


def refuse_protocol(session: Session, run: RunRow, protocol: int) -> ApiError:
    """Pause a run whose driver uses another protocol, until it has a driver with the service's protocol."""
    message = refusal(protocol, PROTOCOL)
    _put_to_rest(session, run, Status.PAUSED, "other_protocol", message)
    return ApiError(409, "other_protocol", message)


def refuse_folder(session: Session, run: RunRow, message: str) -> ApiError:
    """Stop a run whose driver cannot access the run's folder, because any other driver would fail too. Results are
    kept."""
    _put_to_rest(session, run, _at_rest(run), "not_shared", message)
    return ApiError(409, "not_shared", message)


def stop_out_of_memory(session: Session, run: RunRow) -> None:
    """Stop a run whose driver ran out of memory, because the next driver would too. Results are kept."""
    message = "out of memory: the run's driver needed more than it may have. Ask for fewer samples, or for smaller data"
    _put_to_rest(session, run, _at_rest(run), OUT_OF_MEMORY, message)


def _at_rest(run: RunRow) -> Status:
    return Status.FAILED if run.resolved is None else Status.PAUSED


def _put_to_rest(session: Session, run: RunRow, status: Status, code: str, message: str) -> None:
    status = Status.CANCELLED if run.desired_state == DesiredState.CANCEL else status
    store.release(session, run)
    end(session, run, DriverExit(status=status, reason=message, error=failure(code, message)))


def apply_items(session: Session, run: RunRow, items: list[Item]) -> None:
    """Apply the items that are not stored yet. Raises ApiError (409) if items before them are missing."""
    for item in items:
        if item.seq <= run.pushed:
            continue
        if item.seq != run.pushed + 1:
            raise ApiError(409, "gap", f"item {run.pushed + 1} is missing before item {item.seq}; push from there")
        run.pushed = item.seq
        if (handler := HANDLERS.get(item.kind)) is None:
            log.info("%s: ignored item of unknown kind %r from a driver of another version", run.id, item.kind)
        else:
            handler(session, run, item)
    if items:
        store.touch(session, run)


def _update_state(session: Session, run: RunRow, now: DriverState) -> None:
    if Status(run.status) not in DRIVEN:
        return  # the driver has just reported that the run has ended
    if run.status_reason != now.reason and now.reason and run.status != Status.CANCELLING:
        run.status_reason = now.reason
        store.touch(session, run)
    if run.left_s != now.left_s:
        run.left_s = now.left_s
        store.touch(session, run)
    _update_lease(session, run, now.lease)


def _update_lease(session: Session, run: RunRow, wanted: LeaseWanted | None) -> None:
    row = session.get(LeaseRow, run.id)
    if wanted is None:
        return  # the driver does not know yet; keep the grant of an earlier driver
    if row is None:
        row = LeaseRow(run_id=run.id, granted=0, asked_at=time.time())
        session.add(row)
    for name, value in wanted.model_dump().items():
        if getattr(row, name) != value:
            setattr(row, name, value)


def _on_status(session: Session, run: RunRow, item: Item) -> None:
    if item.attempt != run.attempt:
        return  # the item's driver has died meanwhile
    wanted = Status(item.data["status"])
    if run.desired_state == DesiredState.PAUSE and wanted is Status.RUNNING:
        wanted = Status.PAUSING
    if wanted is Status.RUNNING and run.started_at is None:
        run.started_at = item.at
    if wanted in FOLLOWING[Status(run.status)] or wanted == run.status:
        store.set_status(session, run, wanted, item.data["reason"])


def _on_message(session: Session, run: RunRow, item: Item) -> None:
    store.add_event(session, run, "message", item.data["message"], item.data["level"], at=item.at)


def _on_metrics(session: Session, run: RunRow, item: Item) -> None:
    step, kind, values = item.data["step"], item.data["kind"], item.data["values"]
    # If a driver is killed after it reports a step and before it traces the step's end, the next driver repeats the
    # step with the same samples.
    again = session.get(MetricsRow, (run.id, step, kind)) is not None
    session.merge(MetricsRow(run_id=run.id, step=step, kind=kind, at=item.at, values=values))
    run.latest = run.latest | values
    if kind == "step":
        run.step, run.deaths = step, 0
        message = f"step {step} of {run.steps}"
    else:
        message = f"evaluation after step {step}"
    if again:
        return
    shown = {name: value for name, value in values.items() if value is not None}
    store.add_event(session, run, "metrics" if kind == "step" else "evaluation", message, data={
        "step": step, "metrics": shown
    }, at=item.at)  # fmt: skip


def _on_resumed(_: Session, run: RunRow, item: Item) -> None:
    """Reset the run's step to that of the checkpoint; later steps are repeated."""
    if item.attempt == run.attempt:
        run.step = item.data["step"]


def _on_usage(session: Session, run: RunRow, item: Item) -> None:
    """Replace the run's usage. Each item contains the complete usage so far."""
    session.execute(delete(UsageRow).where(UsageRow.run_id == run.id))
    known = UsageRow.__table__.columns.keys()
    rows = [
        UsageRow(run_id=run.id, **{name: value for name, value in usage.items() if name in known})
        for usage in item.data["functions"]
    ]
    session.add_all(rows)
    run.cost_usd = sum(row.cost_usd for row in rows)
    run.device_s = sum(row.busy_device_s + row.idle_device_s + row.cold_device_s for row in rows)


def _on_sized(session: Session, run: RunRow, item: Item) -> None:
    """Record that a run works again after a change of its size, and the seconds of each part of the change."""
    took_s = {name: float(seconds) for name, seconds in item.data["took_s"].items()}
    parts = ", ".join(f"{name.removesuffix('_s')} {seconds:.1f} s" for name, seconds in took_s.items())
    message = f"works on {item.data['devices']} device(s) after {sum(took_s.values()):.1f} s: {parts}"
    store.add_event(session, run, "size", message, data=item.data, at=item.at)


def _on_resolved(_: Session, run: RunRow, item: Item) -> None:
    run.resolved = item.data["spec"]
    run.steps = item.data["spec"]["steps"]


def _on_checkpoints(session: Session, run: RunRow, item: Item) -> None:
    """Replace the list of checkpoints with the item's complete list. New checkpoints become events."""
    known, listed = {entry["id"]: entry for entry in run.checkpoints}, item.data["checkpoints"]
    # The list includes checkpoints of earlier drivers; keep the creation times that are already stored.
    run.checkpoints = [entry | {"created_at": known.get(entry["id"], entry)["created_at"]} for entry in listed]
    for entry in listed:
        if entry["id"] not in known:
            store.add_event(session, run, "checkpoint", f"saved {entry['id']}", data=entry)


def _on_rollouts(session: Session, run: RunRow, item: Item) -> None:
    own = (RolloutRow.run_id == run.id, RolloutRow.place < HELD_OUT_PLACE)
    _keep_samples(session, run, item, 0)
    session.execute(delete(RolloutRow).where(*own, RolloutRow.step < item.data["step"] - KEPT_ROLLOUT_STEPS))


def _on_held_out_rollouts(session: Session, run: RunRow, item: Item) -> None:
    own = (RolloutRow.run_id == run.id, RolloutRow.place >= HELD_OUT_PLACE)
    _keep_samples(session, run, item, HELD_OUT_PLACE)
    steps = select(RolloutRow.step).where(*own).distinct().order_by(RolloutRow.step.desc())
    if oldest := session.scalars(steps.offset(KEPT_EVALUATIONS).limit(1)).first():
        session.execute(delete(RolloutRow).where(*own, RolloutRow.step.between(1, oldest)))


def _keep_samples(session: Session, run: RunRow, item: Item, first: int) -> None:
    """Replace the samples of a step or an evaluation. A driver that repeats a step reports its samples again."""
    step, samples = item.data["step"], item.data["samples"]
    part = RolloutRow.place >= HELD_OUT_PLACE if first else RolloutRow.place < HELD_OUT_PLACE
    session.execute(delete(RolloutRow).where(RolloutRow.run_id == run.id, RolloutRow.step == step, part))
    session.add_all(
        RolloutRow(run_id=run.id, step=step, place=place, data=sample) for place, sample in enumerate(samples, first)
    )


def _on_ended(session: Session, run: RunRow, item: Item) -> None:
    if item.attempt == run.attempt:
        store.release(session, run)
        end(session, run, DriverExit.model_validate(item.data))


def end(session: Session, run: RunRow, ending: DriverExit) -> None:
    """End a driver's attempt: set the status that the user requested, or queue the run for its next driver."""
    status, reason = ending.status, ending.reason
    if ending.retry:
        run.deaths += 1
        if run.desired_state == DesiredState.RUN and run.deaths > MOST_DEATHS:
            status, reason = Status.FAILED, f"{reason}, as did {MOST_DEATHS} before it; see the run's logs"
        else:
            reason = f"{reason}; another driver resumes it"
    if status in (Status.QUEUED, Status.PAUSED) and run.desired_state == DesiredState.CANCEL:
        status, reason = Status.CANCELLED, "cancelled"
    elif status is Status.QUEUED and run.desired_state == DesiredState.PAUSE:
        status, reason = Status.PAUSED, f"paused: {ending.reason}"
    if status is Status.PAUSED:
        run.desired_state = DesiredState.PAUSE
    if status in FOLLOWING[Status(run.status)]:
        run.driver = None
        store.set_status(session, run, status, reason)
        # A run that is queued or was stopped by its user has no error, whatever ended its driver.
        reported = status is Status.FAILED or (status is ending.status and status is not Status.QUEUED)
        run.error = ending.error if reported else None


HANDLERS: dict[str, Callable[[Session, RunRow, Item], None]] = {
    "status": _on_status,
    "message": _on_message,
    "metrics": _on_metrics,
    "resumed": _on_resumed,
    "usage": _on_usage,
    "resolved": _on_resolved,
    "sized": _on_sized,
    "checkpoints": _on_checkpoints,
    "rollouts": _on_rollouts,
    "held_out_rollouts": _on_held_out_rollouts,
    "ended": _on_ended,
}
