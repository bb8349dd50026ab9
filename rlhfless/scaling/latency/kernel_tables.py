"""Measured kernel times by device: the tables of aiconfigurator-core, an optional extra. Pure.

For each device, engine and version, the package ships measured kernel times: matrix products by their three sizes,
attention by heads and context, experts by tokens, all-reduces by message size. Only these Parquet files are read; none
of its code runs. Between measured sizes, times are interpolated linearly in logarithms; above the largest, they grow in
proportion.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhfless.spec.explain import nearest

Array = npt.NDArray[np.float64]
ReplicaRequest = tuple[tuple[str, Any], ...]
"""Required value per column, or a tuple of allowed values."""

SYSTEMS: Mapping[str, str] = MappingProxyType(
    {
        "a100-80gb": "a100_sxm",
        "b200": "b200_sxm",
        "b300": "b300_sxm",
        "gb200": "gb200",
        "gb300": "gb300",
        "h100": "h100_sxm",
        "h200": "h200_sxm",
        "l40s": "l40s",
        "rtx-pro-6000": "rtx_pro_6000_server",
    }
)
"""The package's names of device kinds."""

# Tables of older versions have neither a column for windows nor windows.
_NEWER_COLUMNS = frozenset({"window_size"})

_MS = 1e-3


class NoTables(ValueError):
    """Raised if there are no measured kernels for the request. The message lists the available ones."""


@dataclass(frozen=True)
class Grid:
    """Times over a full grid of sizes."""

    axes: tuple[Array, ...]  # ascending, one per size
    log_seconds: Array  # [axis 0, axis 1, ...]

    @classmethod
    def of(cls, columns: Sequence[Array], seconds: Array) -> Grid:
        """Return the grid of measured rows, using the fastest of several for the same sizes.

        Missing entries are extrapolated in proportion along the last size with measurements, from the next smaller or
        else the next larger one.
        """
        axes = tuple(np.unique(column) for column in columns)
        table = np.full([len(axis) for axis in axes], math.inf)
        places = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, columns, strict=True))
        np.minimum.at(table, places, seconds)
        for number in reversed(range(len(axes))):
            _extrapolate(np.moveaxis(table, number, -1), axes[number])
        return cls(axes, np.log(table))

    def at(self, *sizes: float) -> float:
        """Return the seconds at these sizes."""
        beyond, table = 1.0, self.log_seconds
        for axis, size in zip(self.axes, sizes, strict=True):
            beyond *= max(size / float(axis[-1]), 1.0)
            inside = min(max(size, float(axis[0])), float(axis[-1]))
            high = int(np.searchsorted(axis, inside))
            if axis[high] == inside:
                table = table[high]
            else:
                part = math.log(inside / axis[high - 1]) / math.log(axis[high] / axis[high - 1])
                table = table[high - 1] * (1 - part) + table[high] * part
        return beyond * math.exp(float(table))


def _extrapolate(table: Array, sizes: Array) -> None:
    """Fill infinite entries of `table` [..., sizes] along its last axis, in place."""
    upwards = [(index - 1, index) for index in range(1, len(sizes))]
    for source, index in [*upwards, *((high, low) for low, high in reversed(upwards))]:
        missing = np.isinf(table[..., index])
        table[..., index] = np.where(missing, table[..., source] * sizes[index] / sizes[source], table[..., index])


def tables_folder() -> Path:
    """Return the folder of the installed package's tables. Raises NoTables if it is not installed."""
    package = importlib.util.find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        raise NoTables("aiconfigurator-core is not installed; install it with `pip install 'rlhfless[aiconfigurator]'`")
    return Path(package.submodule_search_locations[0]) / "systems" / "data"


@dataclass(frozen=True)
class Tables:
    """vLLM's tables on one kind of device."""

    folder: Path
    """`tables_folder()`."""
    kind: str
    """A key of SYSTEMS."""

    def __post_init__(self) -> None:
        if self.kind not in SYSTEMS:
            raise NoTables(f"no tables of {self.kind!r}; {nearest(self.kind, SYSTEMS)}There are {', '.join(SYSTEMS)}")

    def grid(self, family: str, name: str, wanted: Mapping[str, Any], axes: Sequence[str]) -> Grid:
        """Return the seconds over `axes`, from the newest table with matching rows. Raises NoTables."""
        columns = self.columns(family, name, wanted)
        return Grid.of([columns[axis] for axis in axes], columns["seconds"])

    def columns(self, family: str, name: str, wanted: Mapping[str, Any]) -> dict[str, Array]:
        """Return the matching rows of the newest table that has any, as numeric columns plus `seconds`.

        A wanted value may be a tuple of allowed ones. Raises NoTables.
        """
        found = next(filter(None, (_rows(path, tuple(wanted.items())) for path in self._files(family, name))), None)
        if found is None:
            sizes = ", ".join(f"{key} {value}" for key, value in wanted.items())
            raise NoTables(f"no table {name} of {self.kind} has {sizes}; take a roofline")
        return found

    def _files(self, family: str, name: str) -> Iterator[Path]:
        """Yield the files, newest version first."""
        files = (self.folder / SYSTEMS[self.kind] / family / "vllm").glob(f"*/{name}.parquet")
        yield from sorted(files, key=lambda path: _version(path.parent.name), reverse=True)


@lru_cache(maxsize=256)
def _rows(path: Path, wanted: ReplicaRequest) -> dict[str, Array] | None:
    table = _table(path)
    for column, value in wanted:
        if column in table.column_names or column not in _NEWER_COLUMNS:
            table = table.filter(pc.is_in(table[column], pa.array(value if isinstance(value, tuple) else (value,))))
    if not table.num_rows:
        return None
    numbers = [field.name for field in table.schema if str(field.type) not in ("string", "large_string")]
    columns = {name: table[name].to_numpy().astype(np.float64) for name in numbers}
    return columns | {"seconds": columns["latency"] * _MS}


@lru_cache(maxsize=32)
def _table(path: Path) -> pa.Table:
    return pq.read_table(path)


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())
