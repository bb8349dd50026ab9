"""The loader of recorded serving runs, by hand: KV of small cards, and data-parallel engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.tiny_scenario import scenario
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.sim.scenarios.timing import kv_tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import latency

LLAMA = ModelShape.of_config(BUILT_IN["llama-3.1-8b"])


def test_kv_of_a_card_of_24_gb() -> None:
    """A tenth is reserved: 3.9 GB, as for large cards, left KV for 12,512 tokens where an engine has 41,408."""
    card = {"machines": [{"kind": "rtx-4090", "devices_per_node": 1}]}
    one = scenario(model={"name": "llama-3.1-8b"}, cluster=card, engine={"memory_fraction": 0.9})
    assert kv_tokens(one, "rtx-4090") == int((24e9 * (0.9 - 0.1) - LLAMA.total_bytes) / 131_072) == 23_956


def test_a_data_parallel_engine_has_the_limits_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "CONFIGS", {"llama": BUILT_IN["llama-3.1-8b"]})
    settings = {"max_num_seqs": 64, "tensor_parallel_size": 1}

    def shape(**more: Any) -> Any:
        meta = {"model": "llama", "engine_kwargs": settings | more}
        return latency.shape_of(meta, latency.roofline_of(Path("run"), meta))

    alone, two = shape(), shape(data_parallel_size=2)
    assert (two.max_sequences, two.chunk_tokens) == (128, 2 * 8192)
    assert two.kv_blocks == pytest.approx(2 * alone.kv_blocks, abs=1)
    assert latency.roofline_of(Path("run"), {"model": "llama", "engine_kwargs": settings | {"data_parallel_size": 2}})
    with pytest.raises(SystemExit, match="pipeline_parallel_size is 2, which is not modelled"):
        shape(pipeline_parallel_size=2)
