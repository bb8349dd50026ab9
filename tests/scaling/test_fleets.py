"""Which runs share engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.live_runs import spec_values
from rlhfless.planning.memory_plan import edited
from rlhfless.scaling.fleets import difference, fleet_key, shared_rank, shared_tokens, terms_of
from rlhfless.spec import RunSpec


def spec(**changes: object) -> RunSpec:
    model = {"path": "some/model", "lora": {"rank": 8, "alpha": 16}}
    made = RunSpec.model_validate(spec_values(Path("assets"), model=model, placement={"share": "adapters"}))
    return edited(made, changes) if changes else made


def test_a_fleet_has_devices_of_its_own_and_learners_in_turns() -> None:
    placement = spec().placement
    assert (placement.mode, placement.tenants, placement.in_turns, placement.engines_in_turns) == (
        "disaggregated",
        8,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.lora.rank", 32),
        ("model.lora.seed", 3),
        ("seed", 7),
        ("steps", 9),
        ("optimizer.learning_rate", 1e-3),
        ("generation.max_tokens", 77),
        ("generation.temperature", 0.7),
        ("timeouts.sync_s", 99),
    ],
)
def test_what_may_differ(key: str, value: object) -> None:
    assert difference(terms_of(spec(**{key: value})), terms_of(spec())) == ""
    assert fleet_key(terms_of(spec(**{key: value}))) == fleet_key(terms_of(spec()))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("model.path", "other/model", "model.path (other/model, and some/model in the fleet)"),
        ("model.dtype", "bfloat16", "model.dtype (bfloat16, and float32 in the fleet)"),
        ("model.lora.rank", 64, "model.lora.rank (slots of rank 64, and 32 in the fleet)"),
        ("generation.engine.max_sequences", 9, "generation.engine.max_sequences (9, and auto in the fleet)"),
        ("placement.tenants", 2, "placement.tenants (2, and 8 in the fleet)"),
    ],
)
def test_what_must_be_equal_is_named(key: str, value: object, text: str) -> None:
    assert difference(terms_of(spec(**{key: value})), terms_of(spec())) == text
    assert fleet_key(terms_of(spec(**{key: value}))) != fleet_key(terms_of(spec()))


def test_ranks_and_lengths_are_rounded_up() -> None:
    assert [shared_rank(rank) for rank in (1, 32, 64)] == [32, 32, 64]
    assert [shared_tokens(longest, None) for longest in (10, 4096, 4097)] == [4096, 4096, 8192]
    assert [shared_tokens(longest, 512) for longest in (10, 512)] == [512, 512]
