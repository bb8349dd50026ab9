"""One's own algorithm in a spec, by import path: what is accepted, what travels, and what is refused how."""

import pickle
import subprocess
import sys
import textwrap
from itertools import count
from typing import Annotated, Literal

import pytest
from pydantic import TypeAdapter

from rlhfless.spec import GRPOSpec, OwnAlgorithmSpec, PluginSpec
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import InputError, SpecError
from rlhfless.spec.extension import PluginField, make
from rlhfless.spec.load import check_resumable, differences, json_schema, load_spec, resolved_yaml

MINIMAL = "model: {path: m}\nprompts: {path: p}\nrewards: [{type: exact_match}]\n"

MODULE = """
    from typing import Annotated
    from pydantic import Field
    from rlhfless.spec import KLSpec, Needs, OwnAlgorithmSpec, PluginSpec

    class Settings(OwnAlgorithmSpec):
        scale: Annotated[float, Field(gt=0)] = 1.0
        '''Factor of the advantages.'''
        kl: KLSpec = KLSpec()
        tags: tuple[str, ...] = ("a",)

        @property
        def needs(self):
            return Needs(reference=self.kl.on, samples_per_prompt=3)

    class Mine:
        Settings = Settings

        def __init__(self, settings):
            self.settings = settings

        def advantages(self, batch): ...
        def loss(self, inputs): ...

    class NoLoss:
        Settings = Settings
        def advantages(self, batch): ...

    class NoSettings:
        def advantages(self, batch): ...
        def loss(self, inputs): ...

    class OtherSettings(NoSettings):
        class Settings(PluginSpec):
            pass

    class Values(Mine):
        class Settings(OwnAlgorithmSpec):
            @property
            def needs(self):
                return Needs(values=True)

    class Critic(Values):
        def returns(self, batch): ...
        def value_loss(self, inputs): ...

    def function(): ...
"""

numbers = count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with classes of the user's own, in the current folder."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{next(numbers)}"  # what was imported before stays imported
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    path = list(sys.path)
    yield name
    sys.path[:] = path


@pytest.fixture
def load(tmp_path):
    def write_and_load(algorithm, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(f"{MINIMAL}algorithm: {algorithm}\n")
        return load_spec(file, overrides)

    return write_and_load


def test_its_keys_are_validated_and_stand_in_the_spec(load, module, tmp_path):
    spec = load(f"{{type: {module}:Mine, scale: 2, kl: {{coefficient: 0.1}}}}")
    settings = spec.algorithm
    assert isinstance(settings, OwnAlgorithmSpec)
    assert (settings.scale, settings.tags, settings.kl.estimator) == (2.0, ("a",), "k3")
    assert settings.needs.reference
    assert make(settings, {}).settings is settings
    with pytest.raises(ValueError, match="frozen"):
        settings.scale = 3
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(spec))
    assert "scale: 2.0" in again.read_text()
    assert load_spec(again) == spec


def test_a_short_name_alone_has_the_defaults(load, module):
    assert load("grpo").algorithm == load("{}").algorithm == GRPOSpec()
    assert load(f"{module}:Mine").algorithm.scale == 1.0
    assert load("{type: grpo}", "algorithm.clip_low=0.1").algorithm.clip_low == 0.1


def test_a_run_is_resumed_with_its_own_settings_only(load, module):
    before, now = load(f"{{type: {module}:Mine}}"), load(f"{{type: {module}:Mine, scale: 3}}")
    assert differences(before, now) == [("algorithm.scale", 1.0, 3.0)]
    check_resumable(before, before, "run.yaml")
    with pytest.raises(InputError, match=r"algorithm\.scale: 3\.0, but the run started with 1\.0"):
        check_resumable(before, now, "run.yaml")
    other = dict(zip("nbw", zip(*differences(load("grpo"), before), strict=True), strict=True))
    assert {"algorithm.type", "algorithm.clip_low", "algorithm.scale"} <= set(other["n"])


def test_what_travels_is_plain_data_and_where_to_import_from(load, module, tmp_path):
    settings = load(f"{{type: {module}:Mine, scale: 2}}").algorithm
    assert pickle.loads(pickle.dumps(settings)) == settings
    file = tmp_path / "settings.pickle"
    file.write_bytes(pickle.dumps(settings))
    # Another process, in another folder: nothing of ours runs before the settings are unpickled.
    script = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).scale)"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", script, str(file)]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "2.0\n"


def test_a_process_that_cannot_import_it_says_so(load, module, tmp_path, monkeypatch):
    data = pickle.dumps(load(f"{module}:Mine").algorithm)
    (tmp_path / f"{module}.py").unlink()
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(InputError, match=f"there is no module '{module}'"):
        pickle.loads(data)


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ("{type: grp}", ["algorithm.type (line 4)", "'grp' is no algorithm", "did you mean `grpo`?", "module:Name"]),
        ("gprrpo", ["algorithm (line 4)", "'gprrpo' is no algorithm"]),
        ("3", ["algorithm (line 4)", "section with keys of its own, got 3"]),
        ("{type: 3}", ["algorithm.type (line 4)", "3", "'grpo'"]),
        ("{type: 'own:'}", ["algorithm.type", "'own:' is no import path", "package.module:Name"]),
        ("{type: no_such:Mine}", ["algorithm.type (line 4)", "there is no module 'no_such'", "PYTHONPATH"]),
        ("{type: 'MODULE:Mien'}", ["there is no `Mien` in", "did you mean `Mine`?"]),
        ("{type: 'MODULE:function'}", ["is a function, not a class", "`advantages`, `loss`, `Settings`"]),
        ("{type: 'MODULE:NoLoss'}", ["is no algorithm: it has no `loss`"]),
        ("{type: 'MODULE:NoSettings'}", ["has no `Settings`", "rlhfless.spec.algorithm.OwnAlgorithmSpec"]),
        ("{type: 'MODULE:OtherSettings'}", ["has a `Settings` that is no OwnAlgorithmSpec"]),
        (
            "{type: 'MODULE:Mine', scael: 2}",
            ["algorithm.scael (line 4)", "unknown key", "did you mean `scale`?", "type, scale, kl, tags"],
        ),
        ("{type: 'MODULE:Mine', scale: -2}", ["algorithm.scale (line 4)", "-2", "greater than 0"]),
        ("{type: 'MODULE:Mine', scale: much}", ["algorithm.scale (line 4)", "'much'", "valid number"]),
        ("{type: 'MODULE:Mine', kl: {estimator: k4}}", ["algorithm.kl.estimator", "'k4'", "'k1', 'k2' or 'k3'"]),
        ("{type: 'MODULE:Mine', clip_low: 2}", ["unknown key", "it is a key of other types: grpo, "]),
        ("{type: 'MODULE:Values'}", ["needs values, and has no `returns`", "docs/extending.md"]),
        ("{type: 'MODULE:Critic'}", ["needs the values of a critic", "`critic: {}`"]),
    ],
)
def test_what_is_wrong_is_named_with_field_value_and_mend(load, module, algorithm, parts):
    with pytest.raises(SpecError) as caught:
        load(algorithm.replace("MODULE", module))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_it_needs_of_the_run_is_checked(load, module):
    with pytest.raises(SpecError, match=r"samples_per_prompt is 2.*set it to 3 or more"):
        load(f"{module}:Mine", "samples_per_prompt=2")


def test_the_fault_of_a_module_is_told_with_its_line(load, module, tmp_path):
    (tmp_path / f"{module}_broken.py").write_text("x = 1\nraise KeyError('x')\n")
    with pytest.raises(SpecError, match=rf"importing '{module}_broken' failed: KeyError: 'x' \(.*_broken\.py:2\)"):
        load(f"{module}_broken:Mine")
    (tmp_path / f"{module}_lacking.py").write_text("import no_such_thing\n")
    with pytest.raises(SpecError, match="needs the module 'no_such_thing', which is not installed"):
        load(f"{module}_lacking:Mine")


def test_the_json_schema_knows_the_built_in_ones_and_that_there_may_be_others():
    schema = json_schema()
    grpo, *_, own, named = schema["properties"]["algorithm"]["anyOf"]
    assert grpo["properties"]["type"]["const"] == "grpo"
    assert "clip_high" in grpo["properties"]
    assert own["properties"]["type"]["pattern"] == r"^[\w.]+:[\w.]+$"
    assert named["type"] == "string"
    text = str(schema)
    assert all(f"'{name}': {{" in text for name in _references(schema))


def _references(schema):
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, value in items:
        if key == "$ref":
            yield value.rpartition("/")[2]
        yield from _references(value)


class AlphaSpec(SpecModel):
    type: Literal["alpha"] = "alpha"


class BetaSpec(SpecModel):
    type: Literal["beta"] = "beta"
    size: int = 1


def test_another_plugin_field_with_several_built_in():
    field = TypeAdapter(
        Annotated[AlphaSpec | BetaSpec | PluginSpec, PluginField("letter", (AlphaSpec, BetaSpec), ("write",))]
    )
    assert field.validate_python({}) == AlphaSpec()
    assert field.validate_python({"type": "beta", "size": 3}) == BetaSpec(size=3)
    assert field.validate_python("beta") == BetaSpec()
    assert field.dump_python(BetaSpec(size=3), mode="json") == {"type": "beta", "size": 3}
    with pytest.raises(ValueError, match=r"'bata' is no letter; did you mean `beta`\? Built in: 'alpha', 'beta'"):
        field.validate_python("bata")
