"""The example of the page and of the API: one spec, which can be planned without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rlhfless.control.api.runs import EXAMPLE
from rlhfless.planning import inputs
from rlhfless.planning.inputs import model_config
from rlhfless.planning.resolve import question_of
from rlhfless.prediction.run_plan import Planner
from rlhfless.scaling.latency.known_models import known_config
from rlhfless.spec import RunSpec

PAGE = Path(inputs.__file__).parents[1] / "control" / "page" / "new.js"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(model: str) -> Any:
        raise FileNotFoundError(f"no such folder, and the hub cannot be reached: {model}")

    monkeypatch.setattr(inputs, "config_file", unreachable)


def test_the_page_begins_with_the_example_of_the_api() -> None:
    text = PAGE.read_text("utf-8")
    (written,) = re.findall(r"const EXAMPLE = `(.*?)`;", text, re.DOTALL)
    assert yaml.safe_load(written) == EXAMPLE
    assert "text.value = EXAMPLE" in text, "a placeholder cannot be planned"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("kind", "count"), [("cpu-core", 2), ("h100", 1), ("l40s", 8)])
def test_the_example_is_planned_without_a_network(kind: str, count: int) -> None:
    spec = RunSpec.model_validate(EXAMPLE)
    planner = Planner(spec).quick()
    row = planner.row(question_of(spec, kind, count))
    assert row["predicted"] is not None or row["problems"], row["reason"]
    if kind != "cpu-core":
        assert row["fits"]


def test_the_service_plans_it(shared_client: httpx.Client) -> None:
    answer = shared_client.post("/v1/runs:plan", json={"spec": EXAMPLE}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["parameters"] == pytest.approx(4.94e8, rel=0.01)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 24),
        ("Qwen/Qwen2.5-7B", 28),
        ("meta-llama/Llama-3.1-8B-Instruct", 32),
        ("meta-llama/Meta-Llama-3.1-70B", 80),
        ("someone/Qwen2.5-7B", None),
        ("Qwen/Qwen2.5-7B-Instruct-1M", None),
        ("Qwen/Qwen2.5-Coder-7B", None),
        ("Qwen/Qwen2.5-99B", None),
        ("qwen2.5-7b", None),
        ("/models/Qwen/Qwen2.5-7B", None),
    ],
)
def test_only_models_whose_sizes_are_built_in_are_known(name: str, layers: int | None) -> None:
    found = known_config(name)
    assert (None if found is None else found["num_hidden_layers"]) == layers
    if layers is None:
        with pytest.raises(FileNotFoundError):
            model_config(name)
