"""Faulty rows of a data set, counted by kind: refused, or skipped where the spec says so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlhfless.prepare.data_rows import Row
from rlhfless.spec import DataSpec
from rlhfless.spec.data import MOST_SKIPPED, skip_hint
from rlhfless.spec.errors import Problem

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """The faulty rows of one source that a run does without."""

    field: str
    total: int
    """All rows of the source."""
    rows: tuple[tuple[str, str], ...]
    """Place and fault of each."""

    def __str__(self) -> str:
        named = "; ".join(f"{where}: {why}" for where, why in self.rows[:_MOST_NAMED])
        more = f"; and {len(self.rows) - _MOST_NAMED:,} more" if len(self.rows) > _MOST_NAMED else ""
        return f"{self.field}: skipped {len(self.rows):,} of {self.total:,} rows: {named}{more}"


class Faults:
    """Rows by kind of fault: the first is named and the others are counted, however many there are."""

    def __init__(self, field: str, total: int) -> None:
        self._field, self._total = field, total
        self._by_kind: dict[str, list[tuple[str, str]]] = {}
        self._rows: dict[str, str] = {}

    def add(self, kind: str, row: Row, detail: str, hint: str) -> None:
        """Note a fault of a row."""
        self._by_kind.setdefault(kind, []).append((f"first at {row.where}: {detail}", hint))
        self._rows.setdefault(row.where, f"{kind}: {detail}")

    @property
    def places(self) -> Collection[str]:
        """`Row.where` of each row with a fault."""
        return self._rows.keys()

    def skipped(self, spec: DataSpec) -> SkippedRows | None:
        """The rows that `on_bad_row: skip` leaves out; None if it is not set, for no rows and for too many."""
        few = 0 < len(self._rows) <= MOST_SKIPPED * self._total
        if spec.on_bad_row != "skip" or not few:
            return None
        return SkippedRows(self._field, self._total, tuple(self._rows.items()))

    def problems(self, spec: DataSpec) -> list[Problem]:
        """One problem for each kind, and one if there are too many rows to skip; none if they are skipped."""
        if self.skipped(spec):
            return []
        way_out = skip_hint(spec, len(self._rows), self._total)
        problems = [
            Problem(
                self._field, f"{kind} in {len(places)} of {self._total} rows, {places[0][0]}", places[0][1] + way_out
            )
            for kind, places in self._by_kind.items()
        ]
        if problems and spec.on_bad_row == "skip":
            what = f"skip, but {len(self._rows)} of {self._total} rows of {self._field} are faulty"
            hint = f"at most {MOST_SKIPPED:.0%} are skipped; correct the rows, or the keys that say how they are read"
            problems.append(Problem(f"{spec.section}.on_bad_row", what, hint))
        return problems

    def warnings(self) -> list[str]:
        """One warning for each kind."""
        return [
            f"{self._field}: {kind} in {len(places)} of {self._total} rows, {places[0][0]}; {places[0][1]}"
            for kind, places in self._by_kind.items()
        ]
