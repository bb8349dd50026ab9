"""Models of the hub are fetched on every node, and the cause of a failed fetch is named."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from rlhfless.fleet import each_node
from rlhfless.fleet.each_node import ModelNotThere, fetch_fault, fetch_on_nodes, hub_models
from rlhfless.spec import RunSpec


def spec(**model: str) -> RunSpec:
    return RunSpec.model_validate({"model": model, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]})


def test_folders_are_not_fetched(tmp_path: Path) -> None:
    assert hub_models(spec(path=str(tmp_path))) == ()
    assert hub_models(spec(path="Qwen/Qwen3-0.6B", tokenizer=str(tmp_path))) == ("Qwen/Qwen3-0.6B",)


def test_every_node_fetches_and_the_one_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name))
    assert fetch_fault(["a/b", "c/d"]) is None
    assert asked == ["a/b", "c/d"]

    def fails(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    fault = fetch_fault(["a/b"])
    assert fault == "a/b: OSError: no space left on device"
    answers = {"10.0.0.1": None, "10.0.0.2": fault}
    monkeypatch.setattr(each_node, "on_each_node", lambda *_, **__: answers)
    with pytest.raises(ModelNotThere, match=r"a/b could not be fetched: node 10\.0\.0\.2: a/b: OSError: no space"):
        fetch_on_nodes(["a/b"], 5.0)
    monkeypatch.setattr(each_node, "on_each_node", lambda *_, **__: {})
    with pytest.raises(ModelNotThere, match=r"no node had it within timeouts\.download_s \(5 s\)"):
        fetch_on_nodes(["a/b"], 5.0)
