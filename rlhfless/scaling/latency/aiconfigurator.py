"""An engine model from measured kernels: the tables of aiconfigurator-core, an optional extra. Pure.

The package ships, for each device and version of vLLM, how long its kernels took: matrix products by their three sizes,
prefill and decode attention by heads and context, all-reduces by message. Only those Parquet files are read; none of
its code runs. Between measured sizes times follow a straight line in logarithms; above the largest they grow in
proportion. An iteration is the sum of its kernels, and of a constant for each small one that has no table.

Deliberately not here: models with experts, and 8 or 4 bit weights. `Roofline` does the former.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.roofline import ALL_REDUCES_PER_LAYER, KERNEL_S
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec.explain import nearest

Array = npt.NDArray[np.float64]

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
"""Device kinds by the package's names."""

SMALL_KERNELS_PER_LAYER = 4
"""Two norms, rotation, and the product of the gate: kernels without a table of their own."""

# Tables of older versions of vLLM have no column for windows, and no windows.
_NEWER_COLUMNS = frozenset({"window_size"})

_MS = 1e-3

# From this much KV in one layer on, reading it is bound by memory; less may sit in the cache from the last repetition.
_BEYOND_CACHE_BYTES = 200e6


class NoTables(ValueError):
    """No measured kernels for the request. The message says which there are."""


@dataclass(frozen=True)
class Grid:
    """Times over a full grid of sizes."""

    axes: tuple[Array, ...]  # ascending, one per size
    log_seconds: Array  # [axis 0, axis 1, ...]

    @classmethod
    def of(cls, columns: Sequence[Array], seconds: Array) -> Grid:
        """The grid of measured rows. Values that were not measured are extrapolated in proportion to their last
        size."""
        axes = tuple(np.unique(column) for column in columns)
        table = np.full([len(axis) for axis in axes], math.inf)
        places = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, columns, strict=True))
        np.minimum.at(table, places, seconds)
        last = axes[-1]
        for index in range(1, len(last)):
            grown = table[..., index - 1] * (last[index] / last[index - 1])
            table[..., index] = np.where(np.isinf(table[..., index]), grown, table[..., index])
        if np.isinf(table).any():
            raise NoTables("a table of kernels lacks small sizes; install another version of aiconfigurator-core")
        return cls(axes, np.log(table))

    def at(self, *sizes: float) -> float:
        """Seconds at these sizes."""
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


def tables_folder() -> Path:
    """The tables of the installed package. Raises NoTables if it is not installed."""
    package = importlib.util.find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        raise NoTables("aiconfigurator-core is not installed; install it with `pip install 'rlhfless[aiconfigurator]'`")
    return Path(package.submodule_search_locations[0]) / "systems" / "data"


@dataclass(frozen=True)
class MeasuredKernels:
    """An `EngineModel` of a dense bf16 model."""

    shape: ModelShape
    kind: str
    """Device kind; a key of SYSTEMS."""
    tensor_parallel: int
    folder: Path
    """`tables_folder()`."""

    def __post_init__(self) -> None:
        if self.kind not in SYSTEMS:
            raise NoTables(f"no tables of {self.kind!r}; {nearest(self.kind, SYSTEMS)}There are {', '.join(SYSTEMS)}")
        shape = self.shape
        if shape.experts or shape.latent or shape.windows or shape.matrix_bytes is not None:
            raise UnknownShape(
                "experts, latent attention, windows or quantised weights: kernel tables are read for dense models "
                "only, of 16 bits and with grouped-query attention to the whole context; take a roofline"
            )

    @property
    def context_s(self) -> float:
        return self._decode_attention[1] * self.shape.layers

    def iteration_s(self, sequences: int) -> float:
        return self._forward_s(sequences) + self.shape.layers * self._decode_attention[0].at(sequences)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        if tokens == 0:
            return 0.0
        # Measured without context: attention grows with the pairs of tokens that it computes.
        pairs = (context_tokens + tokens / 2) / (tokens / 2)
        return self._forward_s(tokens) + self.shape.layers * self._prefill_attention.at(tokens) * pairs

    def _forward_s(self, tokens: int) -> float:
        shape, parallel = self.shape, self.tensor_parallel
        width = shape.dense_mlp // (3 * shape.hidden * shape.layers)
        heads, kv_heads = self._heads
        products = (
            ((heads + 2 * kv_heads) * shape.head_dim, shape.hidden),
            (shape.hidden, heads * shape.head_dim),
            (2 * width / parallel, shape.hidden),
            (shape.hidden, width / parallel),
        )
        layer_s = math.fsum(self._matmul.at(tokens, n, k) for n, k in products) + SMALL_KERNELS_PER_LAYER * KERNEL_S
        if parallel > 1:
            layer_s += ALL_REDUCES_PER_LAYER * self._all_reduce.at(tokens * shape.hidden * shape.weight_bytes)
        return shape.layers * layer_s + self._matmul.at(tokens, shape.vocabulary / parallel, shape.hidden)

    @property
    def _heads(self) -> tuple[int, int]:
        """Query and KV heads of one device."""
        return self.shape.heads // self.tensor_parallel, max(self.shape.kv_heads // self.tensor_parallel, 1)

    @cached_property
    def _matmul(self) -> Grid:
        columns = self._read("gemm", "gemm_perf", {"gemm_dtype": "bfloat16"})
        return Grid.of([columns[name] for name in ("m", "n", "k")], columns["latency"] * _MS)

    @cached_property
    def _all_reduce(self) -> Grid:
        wanted = {"num_gpus": self.tensor_parallel, "kernel_source": "vLLM_custom_graph"}
        columns = self._read("comm", "custom_allreduce_perf", wanted)
        return Grid.of([columns["message_size"]], columns["latency"] * _MS)

    @cached_property
    def _prefill_attention(self) -> Grid:
        columns = self._read("attention", "context_attention_perf", self._attention() | {"batch_size": 1})
        return Grid.of([columns["isl"]], columns["latency"] * _MS)

    @cached_property
    def _decode_attention(self) -> tuple[Grid, float]:
        """Seconds of one layer by batch size with hardly a context, and for each token of context."""
        columns = self._read("attention", "generation_attention_perf", self._attention())
        shortest = columns["step"] == columns["step"].min()
        fixed = Grid.of([columns["batch_size"][shortest]], columns["latency"][shortest] * _MS)
        context = columns["batch_size"] * (columns["step"] + columns["isl"])
        kv_bytes = 2 * self._heads[1] * self.shape.head_dim * self.shape.weight_bytes * context
        large = kv_bytes > _BEYOND_CACHE_BYTES
        if not large.any():
            raise NoTables(f"decode attention of {self.kind} was measured with small contexts only; take a roofline")
        return fixed, float(np.median(columns["latency"][large] * _MS / context[large]))

    def _attention(self) -> dict[str, Any]:
        heads, kv_heads = self._heads
        return {
            "num_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.shape.head_dim,
            "window_size": 0,
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16",
        }

    def _read(self, family: str, name: str, wanted: Mapping[str, Any]) -> dict[str, Array]:
        """The rows of the newest table that has what is wanted, as columns of numbers. Raises NoTables."""
        files = (self.folder / SYSTEMS[self.kind] / family / "vllm").glob(f"*/{name}.parquet")
        for path in sorted(files, key=lambda path: _version(path.parent.name), reverse=True):
            table = pq.read_table(path)
            for column, value in wanted.items():
                if column in table.column_names or column not in _NEWER_COLUMNS:
                    table = table.filter(pc.equal(table[column], value))
            if table.num_rows:
                numbers = [field.name for field in table.schema if not _is_text(field.type)]
                return {column: table[column].to_numpy().astype(np.float64) for column in numbers}
        sizes = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise NoTables(f"no table {name} of {self.kind} for vLLM has {sizes}; take a roofline")


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string")
