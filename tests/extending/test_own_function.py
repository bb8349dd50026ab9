"""A function of one's own, in a folder outside the package: what is checked, planned and placed of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhfless.control.settings import ServiceSettings
from rlhfless.control.spec_admission import code_problems
from rlhfless.fleet.each_node import targets
from rlhfless.planning.memory_plan import memory_plan
from rlhfless.records import FunctionName
from rlhfless.scaling.function_specs import kinds_of, place_run
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import Node
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import SpecError

OF_CONFIG = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPE = ModelShape.of_config(OF_CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
TWO_RANKS = "{second: {type: 'second_policy.kind:SecondPolicy', path: m, ranks: 2}}"

Load = Callable[[str, str], RunSpec]


def test_it_is_placed_and_planned_as_every_other(load_with: Load) -> None:
    spec = load_with("placement: {mode: colocated}\nlearner: {ranks: 2}\nfunctions: ", TWO_RANKS)
    assert [kind.name for kind in kinds_of(spec)] == ["generation", "scoring", "learner", "second"]
    placement = place_run(spec, [Node("n", "n", 16, 16, "h100", 2, 2)])
    assert len(placement.allocation("second", 0).devices) == 2
    plan = memory_plan(spec, SHAPE, device_of("h100"), 2, 512, 2**36)
    assert [
        [part.function for part in device.functions if part.function != "generation"] for device in plan.devices
    ] == [
        ["learner", "second"],
        ["learner", "second"],
    ]
    assert targets(spec) == ("second_policy.kind:SecondPolicy",)


@pytest.mark.parametrize("name", FunctionName)
def test_a_name_of_the_runtime_is_refused(load_with: Load, name: str) -> None:
    with pytest.raises(SpecError, match=f"functions.*'{name}' is taken by the runtime"):
        load_with("functions: ", f"{{{name}: {{type: 'second_policy.kind:SecondPolicy', path: m}}}}")


def test_a_service_runs_it_if_its_operator_allows_the_package() -> None:
    values = {"functions": {"second": {"type": "second_policy.kind:SecondPolicy", "path": "m"}, "third": "a:B"}}
    refused = code_problems(values, ServiceSettings(code=()))
    assert [problem.where for problem in refused] == ["functions.third", "functions.second.type"]
    assert [problem.where for problem in code_problems(values, ServiceSettings(code=("second_policy", "a")))] == []


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{second: {path: m}}", "this function has no `type`"),
        ("{second: reference}", "'reference' is no function"),
        ("{second: {type: 'second_policy.kind:SecondPolicy'}}", "functions.second.path"),
        ("{second: {type: 'second_policy.kind:SecondPolicy', path: m, rank: 2}}", "did you mean `ranks`"),
        ("{second: {type: 'second_policy.kind:Settings', path: m}}", "has no `kind`"),
        ("{Second: {type: 'second_policy.kind:SecondPolicy', path: m}}", "functions.Second"),
    ],
)
def test_mistakes_are_told_when_the_spec_is_loaded(load_with: Load, written: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        load_with("functions: ", written)
