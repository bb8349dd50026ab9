"""A scaling policy of one's own, by import path: in a run's spec, in scenarios and in replays."""

import functools
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fakes.recorded_run import record
from rlhfless.cli import main
from rlhfless.orchestrator.run_scaler import policy_of
from rlhfless.scaling.lengths import LengthPredictor
from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.policies import make_policy
from rlhfless.sim.scenarios import load_scenario
from rlhfless.spec import CheapestSpec, CostAwareSpec
from rlhfless.spec.errors import InputError, SpecError
from rlhfless.spec.load import load_spec, resolved_yaml

HERE = Path(__file__).parent
SCENARIO = HERE.parents[1] / "examples" / "scenarios" / "gsm8k-3b-h100.yaml"
OWN = "by_samples:BySamples"


@pytest.fixture(autouse=True)
def _simulated_runs(monkeypatch, own_folder):
    """The recorded runs of the simulator's tests."""
    monkeypatch.syspath_prepend(HERE.parent / "simulate")


@pytest.fixture
def load(load_with):
    """Loads a spec whose `scaling` is the given text."""
    return functools.partial(load_with, "steps: 7\nscaling: ")


def test_a_policy_is_a_name_or_a_mapping_with_keys_of_its_own(load):
    assert load("{}").scaling.policy == CostAwareSpec(confidence=0.9)
    assert load("{policy: cost_aware}").scaling.policy == CostAwareSpec()
    careless = load("{policy: {type: cost_aware, confidence: 0.6}}")
    assert careless.scaling.policy.confidence == 0.6
    assert policy_of(careless, LengthPredictor(64), None)._deadline._asked == 0.6


@pytest.mark.parametrize("policy", ["queue_reactive_keda", "{type: rlhfless_published, window: 3}"])
def test_a_policy_of_another_system_is_for_the_simulator(load, policy):
    with pytest.raises(SpecError, match=r"scaling\.policy.*was removed(.|\n)*rlhfless simulate"):
        load(f"{{policy: {policy}}}")


def test_one_of_your_own_gets_its_keys_and_what_the_run_asks_for(load, tmp_path):
    contract = "{type: cheapest, deadline_s: 90}"
    spec = load(
        f"{{policy: {{type: '{OWN}', samples_per_actor: 4}}, contract: {contract}, generation: {{max_actors: 2}}}}"
    )
    policy = policy_of(spec, LengthPredictor(64), None)
    assert type(policy).__name__ == "BySamples"
    assert policy.settings.samples_per_actor == 4
    assert policy.run.contract == CheapestSpec(deadline_s=90)
    assert policy.run.steps == 7
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(spec))
    assert load_spec(again) == spec


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("cost_awear", ["scaling.policy (line 5)", "'cost_awear' is no scaling policy", "did you mean `cost_aware`?"]),
        ("{type: cost_aware, confidence: 2}", ["scaling.policy.confidence", "2", "less than 1"]),
        (
            "{type: cost_aware, confidenc: 0.9}",
            ["scaling.policy.confidenc", "unknown key", "`confidence`"],
        ),
        ("{type: static, confidence: 0.9}", ["scaling.policy.confidence", "unknown key"]),
        ("{type: cost_aware, steps: 3}", ["scaling.policy.steps", "unknown key"]),
        (
            f"{{type: '{OWN}', samples_per_actor: 0}}",
            ["scaling.policy.samples_per_actor", "0", "greater than"],
        ),
        (f"{{type: '{OWN}', samples: 3}}", ["scaling.policy.samples", "unknown key", "samples_per_actor"]),
        ("by_samples:BySample", ["there is no `BySample`", "did you mean `BySamples`?"]),
        ("by_samples:PluginSpec", ["is no scaling policy: it has no `decide`"]),
    ],
)
def test_what_is_wrong_is_named_with_field_value_and_mend(load, policy, parts):
    with pytest.raises(SpecError) as caught:
        load(f"{{policy: {policy}}}")
    assert all(part in str(caught.value) for part in parts), caught.value


def scenario(tmp_path, *entries):
    data = yaml.safe_load(SCENARIO.read_text()) | {"policies": list(entries), "steps": 2, "seeds": 1}
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_scenario(path)


@pytest.mark.long
def test_the_simulator_runs_it_in_any_process(tmp_path):
    """With at most as many samples an actor as static co-located has, it is static co-located; with more, slower."""
    chosen = {"name": OWN, "placement": {"mode": "colocated"}}
    entries = [
        {"name": "static_colocated"},
        chosen | {"label": "all", "settings": {"samples_per_actor": 1}},
        chosen | {"label": "one", "settings": {"samples_per_actor": 10**6}},
    ]
    found = compare(scenario(tmp_path, *entries), jobs=2)
    static, every, one = (found.results[label][0].time_s for label in ("static_colocated", "all", "one"))
    assert every == pytest.approx(static, rel=0.01)  # static deals by lengths once it has seen some
    assert one > static


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ({"name": OWN, "settings": {"samples": 3}}, ["settings of policy by_samples:BySamples", "samples", "unknown"]),
        ({"name": "by_samples:Nothing"}, ["policies", "there is no `Nothing`"]),
        ({"name": "no_such_module:Policy"}, ["policies", "there is no module 'no_such_module'"]),
    ],
)
def test_a_scenario_says_what_is_wrong_with_it(tmp_path, entry, parts):
    with pytest.raises(InputError) as caught:
        compare(scenario(tmp_path, entry))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_recorded_run_is_replayed_with_it(tmp_path):
    record(tmp_path / "trace", actors=2, steps=4)
    result = CliRunner().invoke(main.app, ["simulate", "--replay", str(tmp_path), "--policy", OWN])
    assert result.exit_code == 0, result.output
    assert OWN in result.stdout


def test_it_is_made_by_its_import_path():
    assert make_policy(OWN).settings.samples_per_actor == 64
