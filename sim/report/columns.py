"""The columns of every table of policies: terminal, page and markdown show the same columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhfless.sim.experiment.rows import ResultRow
from rlhfless.sim.statistics import Interval

DASH = "-"


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """One figure."""

    title: str
    unit: str
    pick: Callable[[ResultRow], Interval | None]
    digits: int
    percent: bool = False

    def text(self, row: ResultRow) -> str:
        """The mean."""
        interval = self.pick(row)
        return DASH if interval is None else self._number(interval.mean)

    def limits(self, row: ResultRow) -> tuple[str, ...]:
        """Both ends of the interval; empty where it is the mean alone."""
        interval = self.pick(row)
        if interval is None or interval.low == interval.high:
            return ()
        return self._number(interval.low), self._number(interval.high)

    def _number(self, value: float) -> str:
        return f"{100 * value:,.{self.digits}f}" if self.percent else f"{value:,.{self.digits}f}"


COLUMNS = (
    ReportColumn("time", "s per step", lambda row: row.step_s, 1),
    ReportColumn("cost", "$ per step", lambda row: row.step_usd, 4),
    ReportColumn("$ / 1M tokens", "of responses", lambda row: row.usd_per_million_tokens, 2),
    ReportColumn("speed-up", "times", lambda row: row.speed_up, 2),
    ReportColumn("cost", "times", lambda row: row.cost_ratio, 2),
    ReportColumn("busy", "device-s per step", lambda row: row.busy_device_s, 0),
    ReportColumn("idle", "device-s per step", lambda row: row.idle_device_s, 0),
    ReportColumn("cold", "device-s per step", lambda row: row.cold_device_s, 0),
    ReportColumn("busy / held", "%", lambda row: row.utilisation, 0, percent=True),
    ReportColumn("p50", "s", lambda row: row.p50_s, 1),
    ReportColumn("p99", "s", lambda row: row.p99_s, 1),
    ReportColumn("kept", "% of steps", lambda row: row.kept, 0, percent=True),
    ReportColumn("regret", "% above the clairvoyant", lambda row: row.regret, 1, percent=True),
)
