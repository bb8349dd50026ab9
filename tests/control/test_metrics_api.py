"""Metrics of a run: thinned curves, and every metric by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fakes.fake_service import RUN, NoDrivers, served, there_is_ray
from fakes.repository import ROOT
from rlhfless.control.api.metrics import FEWEST, curves, kept, wanted_names
from rlhfless.control.errors import ApiError
from rlhfless.control.settings import ServiceSettings
from rlhfless.telemetry.metrics import METRICS


def test_a_short_curve_stays_as_it_is() -> None:
    assert kept(np.array([3.0, 1.0, 2.0]), 4).tolist() == [0, 1, 2]


def test_first_last_and_the_extremes_of_each_bin_stay() -> None:
    # 6 points of 10: two bins between first and last, of places 1-4 and 5-8.
    values = np.array([0, 5, 1, 9, 2, 4, 4, 3, 8, 7], dtype=float)
    assert kept(values, 6).tolist() == [0, 2, 3, 7, 8, 9]


def test_nan_stays_only_where_a_bin_has_nothing_else() -> None:
    nan = math.nan
    assert kept(np.array([1, nan, 3, 2, nan, nan, nan, nan, nan, 5]), 6).tolist() == [0, 2, 3, 5, 9]


@given(arrays(float, st.integers(1, 500), elements=st.floats(-1e6, 1e6)), st.integers(FEWEST, 200))
def test_extremes_are_never_lost_and_the_bound_holds(values, points: int) -> None:  # type: ignore[no-untyped-def]
    places = kept(values, points)
    assert len(places) <= max(points, FEWEST)
    assert list(places) == sorted(set(places))
    assert {0, len(values) - 1} <= set(places.tolist())
    assert (values[places].min(), values[places].max()) == (values.min(), values.max())


def test_an_evaluation_has_steps_of_its_own_and_a_gap_stays_a_gap() -> None:
    rows = [
        (1, 10.0, json.dumps({"reward_mean": 0.5, "response_tokens/p50": 7.0})),
        (2, 20.0, json.dumps({"reward_mean": None, "response_tokens/p50": 9.0})),
        (2, 21.0, json.dumps({"eval/exact_match": 0.25})),
        (3, 30.0, json.dumps({"reward_mean": 0.75, "response_tokens/p50": 8.0})),
    ]
    found = {one.name: one for one in curves(rows, frozenset(), 100)}
    assert list(found) == ["reward_mean", "eval/exact_match", "response_tokens/p50"]  # as they are declared
    assert found["reward_mean"].values == [0.5, None, 0.75]
    assert (found["eval/exact_match"].steps, found["eval/exact_match"].at) == ([2], [21.0])
    assert found["response_tokens/p50"].unit == "tokens"
    assert found["response_tokens/p50"].help.endswith("50 percent are at most so long")
    assert [one.name for one in curves(rows, frozenset({"eval"}), 100)] == ["eval/exact_match"]


def test_a_metric_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ApiError, match="no metric 'reward_men'; did you mean 'reward_mean'"):
        wanted_names(["reward_men"])


FILES = ROOT / "deploy" / "helm" / "rlhfless" / "files"


def test_alerts_and_panels_use_metrics_that_exist(tmp_path: Path) -> None:
    there_is_ray(tmp_path)
    with served(ServiceSettings(data=str(tmp_path)), NoDrivers()) as (client, _):
        assert client.post("/v1/runs", json=RUN).status_code == 201
        told = set(re.findall(r"^(?:# TYPE )?(rlhfless_\w+)", client.get("/metrics").text, flags=re.MULTILINE))
    told |= {metric.prometheus_name for metric in METRICS.values()}
    for file in ("rules.yaml", "dashboard.json"):
        used = set(re.findall(r"\brlhfless_[a-z_]+", (FILES / file).read_text()))
        assert used
        assert used <= told, used - told
