"""Trainers of TRL, an independent implementation of the losses."""

from __future__ import annotations

from types import ModuleType

import pytest


def trl_trainer(name: str) -> ModuleType:
    """Return the module `trl.trainer.NAME`, imported without vLLM, which takes seconds and is needed by no loss."""
    utilities = pytest.importorskip("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "is_vllm_available", lambda *_, **__: False)
        module: ModuleType = pytest.importorskip(f"trl.trainer.{name}")
    return module
