"""The section `generation.speculation`: what cannot work is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.spec import RunSpec
from rlhfless.spec.base import locations

SMALL: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
OWN_ENGINE = "rlhfless.functions.generation.vllm.adapter:VllmEngine"


def spec(speculation: dict[str, Any], engine: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    generation = {"speculation": speculation, "engine": engine or {}}
    return RunSpec.model_validate(SMALL | {"generation": generation} | changes)


@pytest.mark.parametrize(
    ("speculation", "changes", "parts"),
    [
        ({"method": "fast"}, {}, ["speculation.method", "'suffix'"]),
        ({"method": "suffix", "depth": 0}, {}, ["speculation.depth"]),
        ({"method": "suffix", "depth": 33}, {}, ["speculation.depth"]),
        ({"method": "suffix", "depth": "deep"}, {}, ["speculation.depth", "'auto'"]),
        ({"method": "suffix", "deep": 3}, {}, ["speculation.deep"]),
        ({"method": "draft_model"}, {}, ["method draft_model needs a model"]),
        ({"method": "eagle3"}, {}, ["method eagle3 needs a model"]),
        ({"method": "suffix", "model": "d"}, {}, ["'d' would not be used: method suffix"]),
        ({"model": "d"}, {}, ["'d' would not be used: method off"]),
        ({"method": "ngram"}, {"engine": {"type": OWN_ENGINE}}, ["ngram is for vLLM", OWN_ENGINE]),
        (
            {"method": "draft_model", "model": "d"},
            {"placement": {"mode": "colocated", "turns": True}},
            ["method is draft_model, but functions take turns", "placement.turns to false"],
        ),
    ],
)
def test_what_cannot_work_is_refused(speculation: dict[str, Any], changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(speculation, **changes)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_can() -> None:
    assert not RunSpec.model_validate(SMALL).generation.speculation.on
    assert spec({"method": "suffix"}, placement={"mode": "colocated", "turns": True}).generation.speculation.on
    assert spec({"method": "suffix"}).generation.speculation.most == 8
    assert spec({"method": "eagle3", "model": "d", "depth": 3}).generation.speculation.has_weights


def test_auto_is_a_method_and_a_depth() -> None:
    """`most` is what memory is planned for."""
    auto, deep, fixed, head = (
        spec(values).generation.speculation
        for values in (
            {"method": "auto", "depth": 3},
            {"method": "suffix", "depth": "auto"},
            {"method": "suffix", "depth": 3},
            {"method": "mtp"},
        )
    )
    assert [each.measured for each in (auto, deep, fixed, head)] == [True, True, False, True]
    assert [each.most for each in (auto, deep, fixed, head)] == [3, 8, 3, 4]


def test_a_draft_model_is_a_path() -> None:
    """So that it is made absolute, and a service checks who may read it."""
    assert locations(RunSpec)["generation.speculation.model"].kind == "hub"
