"""Engines that plans compare: scaled by hand, by the user's own measurement, and where nothing was published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from rlhfless.scaling.latency import engines
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.engines import EngineName, Served, load_engines, served, steady_token_s
from rlhfless.scaling.latency.kernel_tables import NoTables
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape

SHAPE = ModelShape.of_config(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
)


@dataclass
class Linear:
    """A millisecond each sequence, a microsecond each token of context, 10 each prompt token."""

    context_s: float = 1e-6

    def iteration_s(self, sequences: int) -> float:
        return 1e-3 * sequences

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return 1e-5 * tokens


def test_a_steady_server_by_hand() -> None:
    """4 requests of 100 tokens in and 200 out: contexts of 4 x 200 at the mean, and each iteration prefills 4 x 100 /
    200 = 2 tokens."""
    assert steady_token_s(Linear(), 4, 100, 200) == pytest.approx(4e-3 + 800e-6 + 20e-6)
    twice = Served(Linear(), 2.0, 0.5e-3, "test")
    assert steady_token_s(twice, 4, 100, 200) == pytest.approx(2 * 4.82e-3 + 0.5e-3)
    assert steady_token_s(twice.times(3.0), 4, 100, 200) == pytest.approx(3 * (2 * 4.82e-3 + 0.5e-3))


def test_without_tables_the_sheet_is_scaled_by_the_engines_own_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise NoTables("not installed")

    monkeypatch.setattr(engines, "tables_folder", none)
    sheet = Roofline(SHAPE, device_of("h100"))
    fit = load_engines()["sglang"].fit("h100", "roofline")
    assert fit.kind == "any", "no run of SGLang on H100 with a named format was published"
    model = served("sglang", SHAPE, device_of("h100"))
    assert model.iteration_s(8) == pytest.approx(fit.scale * sheet.iteration_s(8) + fit.fixed_s)
    assert model.context_s == pytest.approx(fit.scale * sheet.context_s)
    assert "the data sheet, scaled to" in model.source
    assert "on other devices (0.5.6 to 0.5.10, until 2026-04-18" in model.source
    assert "published runs on h200" in served("vllm", SHAPE, device_of("h200")).source


def test_every_engine_has_a_fit_for_any_device_and_says_of_which_versions() -> None:
    table = load_engines()
    assert set(table) == set(get_args(EngineName))
    assert [name for name, engine in table.items() if engine.no_engine is None] == ["vllm"]
    for engine in table.values():
        for by in ("kernels", "roofline"):
            assert engine.fit("no such kind", by).rows >= max(each.rows for each in engine.fits if each.by == by)
