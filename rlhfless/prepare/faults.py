"""Faulty rows of a data set, counted by kind."""

from __future__ import annotations

from rlhfless.prepare.data_rows import Row
from rlhfless.spec.errors import Problem


class Faults:
    """Rows by kind of fault: the first is named and the others are counted, however many there are."""

    def __init__(self, field: str, total: int) -> None:
        self._field, self._total = field, total
        self._by_kind: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, row: Row, detail: str, hint: str) -> None:
        """Note a fault of a row."""
        self._by_kind.setdefault(kind, []).append((f"first at {row.where}: {detail}", hint))

    def problems(self) -> list[Problem]:
        """One problem for each kind."""
        return [
            Problem(self._field, f"{kind} in {len(places)} of {self._total} rows, {places[0][0]}", places[0][1])
            for kind, places in self._by_kind.items()
        ]

    def warnings(self) -> list[str]:
        """One warning for each kind."""
        return [
            f"{self._field}: {kind} in {len(places)} of {self._total} rows, {places[0][0]}; {places[0][1]}"
            for kind, places in self._by_kind.items()
        ]
