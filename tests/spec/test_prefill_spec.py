"""The section `scaling.prefill`: what cannot work is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.spec import RunSpec

SMALL: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}


def spec(prefill: dict[str, Any], **changes: Any) -> RunSpec:
    return RunSpec.model_validate(SMALL | {"scaling": {"prefill": prefill}} | changes)


@pytest.mark.parametrize(
    ("prefill", "changes", "parts"),
    [
        ({"max_actors": -1}, {}, ["scaling.prefill.max_actors"]),
        ({"min_actors": 2, "max_actors": 1}, {}, ["max_actors (1) is below min_actors (2)"]),
        ({"most": 1}, {}, ["scaling.prefill.most"]),
        (
            {"max_actors": 1, "kv_connector": "folder"},
            {"weights": {"transport": "http"}},
            ["kv_connector is folder", "weights.transport is http", "set weights.transport to shared_memory or file"],
        ),
        (
            {"max_actors": 1},
            {"generation": {"speculation": {"method": "mtp"}}},
            ["max_actors is 1", "mtp, which has KV of its own", "set method to ngram"],
        ),
        ({"max_actors": 1}, {"placement": {"mode": "colocated", "turns": True}}, ["take turns", "turns to false"]),
        ({"max_actors": 1}, {"placement": {"tenants": 2}}, ["take turns", "placement.tenants"]),
        ({"max_actors": 2}, {"weights": {"transport": "cuda_ipc"}}, ["max_actors is 2", "transport is cuda_ipc"]),
        (
            {"max_actors": 1},
            {"schedule": {"type": "async"}},
            ["schedule.in_flight to false"],
        ),
    ],
)
def test_what_cannot_work_is_refused(prefill: dict[str, Any], changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(prefill, **changes)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_can() -> None:
    assert not RunSpec.model_validate(SMALL).scaling.prefill.on
    assert spec({"max_actors": 1}).scaling.prefill.on
    assert spec({"min_actors": 2, "max_actors": 2, "kv_connector": "folder"}).scaling.prefill.connector == "folder"
    assert spec({"max_actors": 0}, weights={"transport": "http"}).scaling.prefill.connector is None
    assert spec({"max_actors": 1}, generation={"speculation": {"method": "suffix"}}).scaling.prefill.on
