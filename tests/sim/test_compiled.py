"""Loops as machine code, also where nothing can be kept on disk."""

from __future__ import annotations

import numpy as np
import pytest
from numba.core import caching

from rlhfless.sim.compiled import compiled


def total(values: np.ndarray) -> float:
    found = 0.0
    for value in values:
        found += value
    return found


def test_without_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    fast = compiled(total)
    assert fast(np.array([1.0, 2.0, 4.0])) == 7.0
    assert not fast.stats.cache_path
    monkeypatch.undo()
    assert compiled(total).stats.cache_path
