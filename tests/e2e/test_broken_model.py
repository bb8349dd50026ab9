"""Weights that only a loader can judge: the run ends with what is wrong with them, and not with a replica's death."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fakes.live_runs import fault_opening
from rlhfless.orchestrator.driver import execute
from rlhfless.planning import preflight as checks
from rlhfless.spec.errors import InputError

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(600)]


async def test_nan_in_weights_that_preflight_does_not_read(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(assets / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(checks, "weight_problems", lambda *_, **__: [])  # as for a hub model that is not here yet
    session = fault_opening(assets, tmp_path / "run", actors=1, model={"path": str(model)})
    session.folder.mkdir()
    with pytest.raises(InputError) as caught:
        await execute(session)
    assert str(caught.value) == (
        f"the model {str(model)!r}: 1 problem\n"
        "- model.path: NaN or infinite values are in tensor 'lm_head.weight' (as float32)\n"
        "    fetch the model again from where it came from"
    )
