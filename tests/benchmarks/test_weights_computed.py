"""The computed seconds of transports: the page has them as the function gives them, and they are right by hand."""

from __future__ import annotations

import pytest
import weights_computed
from weights_computed import MODELS, RATES, Model, cuda_ipc, http, nccl, shared_memory, table

from fakes.repository import ROOT


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "weights.md").read_text(), "print it with benchmarks/weights_computed.py"


def test_by_hand() -> None:
    model = Model("one GB", 1.0, 1)
    assert shared_memory(model, False) == pytest.approx(1 / 2.1 + 1 / 5)
    assert shared_memory(model, True) == pytest.approx(1 / 10 + 1 / 20)
    assert shared_memory(Model("of four", 1.0, 4), True) == pytest.approx(1 / 10 + 1 / 20)
    assert http(model, False) == pytest.approx(1 / 2.1 + 1 / 5 + 1 / 1.3 + 1 / 37)
    assert nccl(model, False) == pytest.approx(1 / 2.1 + 1 / 5 + 1 / 8.1)
    assert nccl(model, True) == pytest.approx(1 / 10 + 1 / 20 + 1 / 200)
    assert cuda_ipc(model, False) == pytest.approx(1 / 37 + 1 / 8.1)
    assert cuda_ipc(model, True) == pytest.approx(2 / 150 + 2 / 200 + 2 / 1300 + 1e9 / 2**28 * 1e-3)
    assert cuda_ipc(Model("of four", 1.0, 4), False) is None, "it went to one GPU"


def test_nothing_became_slower() -> None:
    for name, way in weights_computed.WAYS.items():
        for model in MODELS:
            before, now = way(model, False), way(model, True)
            assert before is None or (now is not None and now < before), name
    assert RATES.device_hash > RATES.hash
