"""What a plan knows of drafts: those of an earlier run, at the depth of this one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhfless.prediction.simulated import Lengths, _drafts, lengths_of
from rlhfless.records import Invocation, Work
from rlhfless.spec import RunSpec

VALUES: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}


def spec(**speculation: Any) -> RunSpec:
    return RunSpec.model_validate(VALUES | {"generation": {"speculation": speculation}})


def recorded() -> Lengths:
    """Two calls with 100 tokens, of which 40 are accepted drafts, so 60 passes of a response; one without drafts."""
    calls = [
        Invocation("generation", name, "i", Work.GENERATE, 1, 0.0, 1.0, output_tokens=tokens, drafted=of, accepted=took)
        for name, tokens, of, took in (("a", 70, (30, 20), (20, 10)), ("b", 30, (24, 4), (10,)), ("c", 50, (), ()))
    ]
    rows = [SimpleNamespace(response_tokens=tokens, prompt_tokens=10) for tokens in (20, 30)]
    meta = SimpleNamespace(run_id="earlier", spec={"generation": {"speculation": {"method": "suffix"}}})
    trace = SimpleNamespace(rollouts=rows, invocations=calls, steps=[], meta=meta)
    return lengths_of(spec(), cast("Any", trace))


def test_the_drafts_of_an_earlier_run_are_predicted_with() -> None:
    lengths = recorded()
    assert lengths.drafted == pytest.approx((54 / 60, 24 / 60))
    assert lengths.accepted == pytest.approx((30 / 60, 10 / 60))
    (drafts,) = _drafts(spec(method="suffix"), lengths).values()
    assert (drafts["depth"], drafts["accepted"]) == ("auto", lengths.accepted)
    (drafts,) = _drafts(spec(method="suffix", depth=1), lengths).values()
    assert (drafts["depth"], drafts["drafted"], drafts["accepted"]) == (1, lengths.drafted[:1], lengths.accepted[:1])


def test_without_drafts_nothing_is_saved() -> None:
    assert _drafts(spec(), recorded()) == {}
    assert _drafts(spec(method="suffix"), lengths_of(spec(), None)) == {}


def test_the_drafts_of_another_method_say_nothing() -> None:
    assert _drafts(spec(method="ngram"), recorded()) == {}
    assert _drafts(spec(method="auto"), recorded()) == _drafts(spec(method="suffix"), recorded())
