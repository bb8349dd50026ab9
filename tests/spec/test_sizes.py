"""Sizes that a spec may ask for: each is bounded, and no spec that is valid fills the driver's memory."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhfless.functions.calls import Call
from rlhfless.functions.generation.messages import Sampling
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.records import Prompt, Work
from rlhfless.spec import RunSpec
from rlhfless.spec.base import MOST_SIZES, SAMPLE_BYTES, driver_bytes
from rlhfless.spec.explain import explain

SPEC: dict[str, Any] = {
    "model": {"path": "some/model"},
    "prompts": {"path": "some/prompts", "held_out": {"fraction": 0.5}},
    "rewards": [{"type": "exact_match"}],
}
GIB = 2**30

MOST_SAMPLES_BYTES = 2 * GIB
"""What the samples of any valid spec need in the driver before the first is drawn."""

MOST_DEFAULT_BYTES = 41 * GIB
"""The same, with both data sets as large as they may be by default, and of the worst content."""

BY_THEIR_PRODUCT = {
    ".demonstrations.held_out.max_prompts",
    ".preferences.held_out.max_prompts",
    ".prompts.held_out.max_prompts",
    ".evaluation.sets[].max_prompts",
    ".prompts_per_step",
    ".samples_per_prompt",
    ".evaluation.samples_per_prompt",
    ".steps",
    ".mini_batches",
}
"""Counts that `sizes` bounds."""

NOT_COUNTED = {".generation.stop_token_ids[]"}
"""Integers that are no count."""


def unbounded(node: dict[str, Any], path: str, shared: dict[str, Any], seen: frozenset[str]) -> Iterator[str]:
    """Integers, times and lists of a JSON schema without an upper limit."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(shared[name], path, shared, seen | {name})
        return
    number = node.get("type") == "integer" or (node.get("type") == "number" and path.endswith("_s"))
    if number and not {"maximum", "exclusiveMaximum", "enum"} & node.keys():
        yield path
    if node.get("type") == "array" and "maxItems" not in node:
        yield path
    for name, inner in node.get("properties", {}).items():
        yield from unbounded(inner, f"{path}.{name}", shared, seen)
    if "items" in node:
        yield from unbounded(node["items"], f"{path}[]", shared, seen)
    for inner in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from unbounded(inner, path, shared, seen)


def problems(changes: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(SPEC | changes)
    return [str(problem) for problem in explain(caught.value, RunSpec, {}, SPEC | changes)]


def test_every_count_has_an_upper_limit() -> None:
    schema = RunSpec.model_json_schema()
    found = set(unbounded(schema, "", schema["$defs"], frozenset()))
    assert found == BY_THEIR_PRODUCT | NOT_COUNTED


def test_a_size_is_refused_with_figure_limit_and_the_key_that_raises_it() -> None:
    told = problems({"samples_per_prompt": 2**31})
    assert told[0] == (
        "samples_per_prompt: prompts_per_step (64) x samples_per_prompt (2,147,483,648) is 137,438,953,472, above "
        "sizes.step_samples (65,536)\n    ask for less; it can be 1,048,576 at most"
    )
    assert told[1].startswith("generation.max_tokens: ")
    (steps,) = problems({"steps": 200_000})
    hint = "ask for less, or raise sizes.steps; it can be 10,000,000 at most"
    assert steps == f"steps: steps is 200,000, above sizes.steps (100,000)\n    {hint}"
    assert RunSpec.model_validate(SPEC | {"steps": 200_000, "sizes": {"steps": 200_000}}).steps == 200_000
    (evaluated,) = problems({"evaluation": {"samples_per_prompt": 1000}})
    assert "sizes.held_out_samples (65,536)" in evaluated
    (bound,) = problems({"sizes": {"step_samples": 10**30}})
    assert "less than or equal to 1048576" in bound


COUNT = st.one_of(st.integers(1, 100), st.integers(0, 2**31), st.sampled_from([2**31, 2**63, 10**30]))


@given(COUNT, COUNT, COUNT, COUNT, COUNT, st.booleans())
def test_what_a_valid_spec_needs_before_its_first_sample_is_bounded(
    prompts: int, samples: int, held_out: int, evaluated: int, tokens: int, raised: bool
) -> None:
    values = {
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "prompts": SPEC["prompts"] | {"held_out": {"fraction": 0.5, "max_prompts": held_out}},
        "evaluation": {"samples_per_prompt": evaluated},
        "generation": {"max_tokens": tokens},
        "sizes": MOST_SIZES.model_dump() if raised else {},
    }
    try:
        spec = RunSpec.model_validate(SPEC | values)
    except ValidationError:
        return
    drawn = max(prompts * samples, held_out * evaluated)
    assert drawn * SAMPLE_BYTES <= MOST_SAMPLES_BYTES
    assert raised or driver_bytes(drawn, spec.sizes) <= MOST_DEFAULT_BYTES


@pytest.mark.parametrize(("prompts", "samples"), [(1, 10_000), (10_000, 1), (100, 100)])
def test_a_sample_takes_no_more_than_is_said(prompts: int, samples: int) -> None:
    """Its item, its place in the tables of the stage, and its part of the request, also as it is sent."""
    given = tuple(Prompt(f"{number:032x}", tuple(range(1000, 1064)), "text") for number in range(prompts))
    request = RolloutRequest(Call("run", 1, 1), given, samples, Sampling(16, 1.0), Work.GENERATE, 0, 1)
    tracemalloc.start()
    try:
        table = InFlightSamples(request, RunSpec.model_validate(SPEC), 2)
        table.assignment.give(np.arange(prompts * samples), 0)
        asked = table.submit(np.arange(prompts * samples), 0, "actor", "v")
        sent = pickle.dumps(asked, protocol=5)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pickle.loads(sent).items) == prompts * samples
    assert peak_bytes <= SAMPLE_BYTES * prompts * samples, peak_bytes / (prompts * samples)
