"""Contracts: from the spec to a step's share, and what is refused."""

from __future__ import annotations

from pydantic import TypeAdapter

from rlhfless.scaling.policies.contract import (
    CheapestUnderDeadline,
    FastestUnderBudget,
    Weighted,
    best_of,
    contract_for_step,
)
from rlhfless.spec import CheapestSpec, ContractSpec, FastestSpec, WeightedSpec


def test_the_spec_tells_contracts_apart_by_type():
    adapter = TypeAdapter(ContractSpec)
    spec = adapter.validate_python({"type": "cheapest", "deadline_s": 600, "per": "run"})
    assert spec == CheapestSpec(deadline_s=600, per="run")
    assert adapter.validate_python({"type": "weighted"}) == WeightedSpec(time_weight=0.5)


def test_a_step_contract_loses_what_the_step_takes_beside_generation():
    got = contract_for_step(CheapestSpec(deadline_s=60), steps_left=5, spent_s=1000, other_s=20)
    assert got == CheapestUnderDeadline(40)


def test_the_best_figures_keep_the_contract():
    tried = [(10, 5.0), (20, 3.0), (40, 2.0)]
    assert best_of(tried, CheapestSpec(deadline_s=25), 25.0) == 1
    assert best_of(tried, CheapestSpec(deadline_s=5), 5.0) == 0
    assert best_of(tried, FastestSpec(budget_usd=4), 4.0) == 1
    assert best_of(tried, FastestSpec(budget_usd=1), 1.0) == 2
    # Half and half: 0.5 (1 + 2.5) = 0.5 (2 + 1.5) < 0.5 (4 + 1), and of equals the first.
    assert best_of(tried, WeightedSpec(), None) == 0
    assert best_of(tried, WeightedSpec(time_weight=1.0), None) == 0
    assert best_of(tried, WeightedSpec(time_weight=0.0), None) == 2


def test_a_run_contract_is_shared_by_the_steps_that_are_left():
    # 1000 s less 400 s, over 5 steps, less 20 s each.
    deadline = contract_for_step(CheapestSpec(deadline_s=1000, per="run"), steps_left=5, spent_s=400, other_s=20)
    assert deadline == CheapestUnderDeadline(100)
    budget = contract_for_step(FastestSpec(budget_usd=10, per="run"), steps_left=4, spent_usd=2, other_usd=0.5)
    assert budget == FastestUnderBudget(1.5)


def test_a_run_that_has_spent_all_has_an_empty_contract():
    got = contract_for_step(FastestSpec(budget_usd=10, per="run"), steps_left=4, spent_usd=12)
    assert got == FastestUnderBudget(0)


def test_weights_are_the_same_for_every_step():
    assert contract_for_step(WeightedSpec(time_weight=0.3), steps_left=9) == Weighted(0.3)
