"""The columns of every table of policies: terminal, page and markdown show the same columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhfless.sim.experiment.rows import Row
from rlhfless.sim.experiment.statistics import Interval

DASH = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One figure."""

    title: str
    unit: str
    pick: Callable[[Row], Interval | None]
    digits: int
    percent: bool = False

    def text(self, row: Row) -> str:
        """The mean."""
        interval = self.pick(row)
        return DASH if interval is None else self._number(interval.mean)

    def span(self, row: Row) -> str:
        """The interval; empty where it is the mean alone."""
        interval = self._spread(row)
        return f"{self._number(interval.low)} to {self._number(interval.high)}" if interval else ""

    def half(self, row: Row) -> str:
        """Half the width of the interval; empty where it is the mean alone."""
        interval = self._spread(row)
        return f"±{self._number((interval.high - interval.low) / 2)}" if interval else ""

    def _spread(self, row: Row) -> Interval | None:
        interval = self.pick(row)
        return None if interval is None or interval.low == interval.high else interval

    def _number(self, value: float) -> str:
        return f"{100 * value:,.{self.digits}f}" if self.percent else f"{value:,.{self.digits}f}"


COLUMNS = (
    Column("time", "s per step", lambda row: row.step_s, 1),
    Column("cost", "$ per step", lambda row: row.step_usd, 4),
    Column("$ / 1M tokens", "of responses", lambda row: row.usd_per_million_tokens, 2),
    Column("speed-up", "times", lambda row: row.speed_up, 2),
    Column("cost", "times", lambda row: row.cost_ratio, 2),
    Column("busy", "device-s per step", lambda row: row.busy_device_s, 0),
    Column("idle", "device-s per step", lambda row: row.idle_device_s, 0),
    Column("cold", "device-s per step", lambda row: row.cold_device_s, 0),
    Column("busy / held", "%", lambda row: row.utilisation, 0, percent=True),
    Column("p50", "s", lambda row: row.p50_s, 1),
    Column("p99", "s", lambda row: row.p99_s, 1),
    Column("kept", "% of steps", lambda row: row.kept, 0, percent=True),
    Column("regret", "% above the clairvoyant", lambda row: row.regret, 1, percent=True),
)
