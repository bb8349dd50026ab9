"""Families of mixtures of experts in the learner: checkpoints, divided experts, and replayed routes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_router_replay import ENGINE, STEP, own_routes, shifted, with_routes

from fakes.expert_families import EXPERTS, FAMILIES, K, save_family
from fakes.tiny_learner import make_batch, run_learner
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.learner.rank import LearnerRank

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_saved_under_its_own_names(family, learner, batch, tmp_path):
    save_family(family, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    with learner(str(tmp_path / "model"), optimizer=STEP) as rank:
        before = rank.weights()
        metrics = rank.learn(batch, Passes())
        after = rank.weights()
    assert before.keys() == stored.keys()
    assert all(torch.equal(before[name], value) for name, value in stored.items())
    fixed = {name for name in after if torch.equal(after[name], stored[name])}
    assert fixed == {name for name in stored if name.endswith("e_score_correction_bias")}
    assert 0 < metrics["router_entropy"] <= np.log(EXPERTS) + 1e-6
    assert 1 <= metrics["expert_load_max"] <= EXPERTS / K


@pytest.mark.parametrize("family", FAMILIES)
def test_its_routes_are_replayed(family, learner, batch, tmp_path):
    model = str(tmp_path / "model")
    save_family(family, tmp_path / "model")
    with learner(model, optimizer=STEP) as rank:
        rows = own_routes(rank, batch)
        old = rank.evaluate(batch)
        metrics, weights = rank.learn(batch, Passes()), rank.weights()
    with learner(model, optimizer=STEP, algorithm=ENGINE, routes_folder=str(tmp_path / "own")) as rank:
        given = with_routes(batch, rows, tmp_path / "own")
        np.testing.assert_array_equal(rank.evaluate(given), old)
        theirs = rank.learn(given, Passes())
        assert all(torch.equal(value, weights[name]) for name, value in rank.weights().items())
        other = with_routes(batch, shifted(rows), tmp_path / "own")
        moved = rank.evaluate(dataclasses.replace(other))
        assert rank.learn(other, Passes())["differing_routes"] > 0.9
    assert theirs["differing_routes"] == theirs["missing_routes"] == 0
    assert {name: theirs[name] for name in metrics} == metrics
    assert np.abs(moved - old).max() > 0.01


def divided(rank: LearnerRank, _: int, batch: Any) -> tuple:
    old = rank.evaluate(batch)
    metrics = rank.learn(batch, Passes())
    return old, metrics, {name: value.numpy() for name, value in rank.weights().items()}, rank.probe_logprobs((1, 7, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_experts_are_divided(family, tmp_path):
    save_family(family, tmp_path / "model")
    options = {"batch": make_batch()}
    (expected,) = run_learner(divided, str(tmp_path / "model"), tmp_path, 1, **options)
    changes = {"expert_parallel": 2}
    for theirs in run_learner(divided, str(tmp_path / "model"), tmp_path, 2, changes=changes, **options):
        assert not isinstance(theirs, Exception), theirs
        np.testing.assert_allclose(theirs[0], expected[0], atol=2e-5, rtol=1e-5)
        assert theirs[1] == pytest.approx(expected[1], abs=1e-4, rel=1e-4)
        for name, value in expected[2].items():
            np.testing.assert_allclose(theirs[2][name], value, atol=2e-6, rtol=1e-5, err_msg=name)
        assert theirs[3] == pytest.approx(expected[3], abs=2e-5)
