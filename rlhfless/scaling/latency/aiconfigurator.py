"""An engine model from measured kernels (`kernel_tables`): an iteration is the sum of its kernels. Pure.

Kernels without a table count as a constant each, and so does any time not spent in kernels. Supported are dense models
with grouped-query attention under tensor parallelism, in weights and products of 16, 8 and 4 bits. Layers with a window
read the window in every iteration. Anything else raises NoTables; `Roofline` covers everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rlhfless.scaling.latency.kernel_tables import Grid, NoTables, Tables
from rlhfless.scaling.latency.roofline import ACTIVATION_BYTES, ALL_REDUCES_PER_LAYER, KERNEL_S
from rlhfless.scaling.latency.shape import ModelShape

SMALL_KERNELS_PER_LAYER = 4
"""Kernels without a table: two norms, rotation, and the gate's product."""

# Minimum KV in one layer for which reading it is memory-bound; less may still be cached from the last repetition.
_BEYOND_CACHE_BYTES = 200e6

_PRODUCTS: Mapping[int, tuple[str, ...]] = MappingProxyType({16: ("bfloat16",), 8: ("fp8_block", "fp8"), 4: ("nvfp4",)})
"""The tables' formats by bits of products. The fastest kernel counts, also among kernels of one format: vLLM's
`fp8_block` table was measured with kernel launches, which engines avoid by replaying graphs."""


@dataclass(frozen=True)
class MeasuredKernels:
    """An `EngineModel` from measured kernels."""

    shape: ModelShape
    tables: Tables
    tensor_parallel: int = 1
    """Devices per rank."""
    data_parallel: int = 1
    """Ranks; experts are spread over all of their devices."""

    @classmethod
    def of(cls, shape: ModelShape, kind: str, devices: tuple[int, int], folder: Path) -> MeasuredKernels:
        """Return the model. `devices` are the tensor and data parallel sizes. Raises NoTables for a missing kernel."""
        other = {"linear attention": shape.linear, "experts": shape.experts, "latent attention": shape.latent}
        if missing := [name for name, part in other.items() if part]:
            raise NoTables(f"kernels of {missing[0]} are not summed; take a roofline")
        model = cls(shape, Tables(folder, kind), *devices)
        model.prefill_s(1)
        model.iteration_s(1)
        return model

    @property
    def context_s(self) -> float:
        return self._decode_attention[1] * self.shape.full_layers / self.data_parallel

    def iteration_s(self, sequences: int) -> float:
        each = max(sequences / self.data_parallel, 1)
        fixed, token_s = self._decode_attention
        windows = self.shape.windows
        held_s = each * token_s * windows.layers * windows.tokens if windows else 0.0
        return self._forward_s(sequences) + self.shape.layers * fixed.at(each) + held_s

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        if tokens == 0:
            return 0.0
        # Measured without context: attention grows with the number of token pairs.
        each, shape = max(tokens / self.data_parallel, 1), self.shape
        pairs = shape.full_layers * (context_tokens + tokens / 2) / (tokens / 2)
        if shape.windows:
            pairs += shape.windows.layers * shape.windows.attended(tokens, context_tokens) / (tokens * tokens / 2)
        return self._forward_s(tokens) + pairs * self._prefill_attention.at(each)

    def _forward_s(self, tokens: int) -> float:
        """Return the seconds of everything but attention, whose measurements for some engines include its products."""
        shape, parallel = self.shape, self.tensor_parallel
        each = max(tokens / self.data_parallel, 1)
        layer_s = math.fsum(self._matmul.at(each, n, k) for n, k in self._products())
        layer_s += SMALL_KERNELS_PER_LAYER * KERNEL_S
        if parallel > 1:
            layer_s += ALL_REDUCES_PER_LAYER * self._all_reduce.at(each * shape.hidden * ACTIVATION_BYTES)
        head_s = self._head_matmul.at(each, shape.vocabulary / parallel, shape.hidden)
        return shape.layers * layer_s + head_s

    def _products(self) -> Iterator[tuple[float, float]]:
        """Yield the sizes (n, k) of a layer's products on one device."""
        shape, parallel = self.shape, self.tensor_parallel
        heads, kv_heads = self._heads
        yield (heads + 2 * kv_heads) * shape.head_dim, shape.hidden
        yield shape.hidden, heads * shape.head_dim
        if width := shape.dense_mlp / (3 * shape.hidden * shape.layers):
            yield 2 * width / parallel, shape.hidden
            yield shape.hidden, width / parallel

    @property
    def _heads(self) -> tuple[int, int]:
        """Return the numbers of query and KV heads on one device."""
        return max(self.shape.heads // self.tensor_parallel, 1), max(self.shape.kv_heads // self.tensor_parallel, 1)

    @cached_property
    def _matmul(self) -> Grid:
        return self._gemm(self._formats)

    @cached_property
    def _head_matmul(self) -> Grid:
        return self._gemm(_PRODUCTS[16])

    def _gemm(self, formats: tuple[str, ...]) -> Grid:
        return self.tables.grid("gemm", "gemm_perf", {"gemm_dtype": formats}, ("m", "n", "k"))

    @cached_property
    def _all_reduce(self) -> Grid:
        wanted = {"num_gpus": self.tensor_parallel}
        return self.tables.grid("comm", "custom_allreduce_perf", wanted, ("message_size",))

    @cached_property
    def _prefill_attention(self) -> Grid:
        wanted = self._attention | {"batch_size": 1, "attn_dtype": "bfloat16"}
        return self.tables.grid("attention", "context_attention_perf", wanted, ("isl",))

    @cached_property
    def _decode_attention(self) -> tuple[Grid, float]:
        """Return the seconds of one layer by batch size with almost no context, and per token of context."""
        columns = self.tables.columns("attention", "generation_attention_perf", self._attention)
        shortest = columns["step"] == columns["step"].min()
        fixed = Grid.of([columns["batch_size"][shortest]], columns["seconds"][shortest])
        context = columns["batch_size"] * (columns["step"] + columns["isl"])
        heads = self.shape.kv_heads / self._heads[1]
        large = self.shape.kv_layer_bytes / heads * context > _BEYOND_CACHE_BYTES
        if not large.any():
            kind = self.tables.kind
            raise NoTables(f"decode attention of {kind} was measured with small contexts only; take a roofline")
        return fixed, float(np.median(columns["seconds"][large] / context[large]))

    @property
    def _attention(self) -> dict[str, Any]:
        heads, kv_heads = self._heads
        return {
            "num_heads": heads,
            # Tables use one name if every head has its own KV.
            "num_key_value_heads": kv_heads,
            "head_dim": self.shape.head_dim,
            "window_size": 0,
            "kv_cache_dtype": "fp8" if self.shape.kv_number_bytes == 1 else "bfloat16",
        }

    @property
    def _formats(self) -> tuple[str, ...]:
        """Return the formats of weights and products. Raises NoTables for unsupported ones."""
        shape = self.shape
        if shape.product_bits == 16 and shape.matrix_bytes is not None:
            if shape.matrix_bytes == 0.5:
                return ("int4_wo",)
            raise NoTables("weights of 8 bits multiplied in 16 have no table; take a roofline")
        return _PRODUCTS[shape.product_bits]
