"""Where the modules are searched that a spec names."""

import importlib
import sys

import pytest

from rlhfless.rewards import RewardError, checker
from rlhfless.spec.imports import folders_in_use, load_target
from rlhfless.spec.load import IMPORTS_FILE, load_spec


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A spec's folder and a current folder, each empty, with an import path of the test's own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec, current = tmp_path / "spec's", tmp_path / "current"
    spec.mkdir()
    current.mkdir()
    monkeypatch.chdir(current)
    yield spec, current
    for name in [name for name in sys.modules if name.startswith("own_of_spec_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def written(folder, target, name="run.yaml"):
    path = folder / name
    reward = f"- {{type: python, target: '{target}'}}\n"
    path.write_text(f"model: {{path: m/m}}\nprompts: {{path: p/p}}\nrewards:\n{reward}")
    return path


def module(folder, name, value):
    (folder / f"{name}.py").write_text(f"def score(response):\n    return {value}\n")


def value_of(spec):
    checker(spec.rewards[0], None)  # it is imported, as validate does
    return load_target(spec.rewards[0].target)("x")


def test_a_module_beside_the_spec_is_found_from_any_folder(folders):
    beside, _ = folders
    module(beside, "own_of_spec_a", 1)
    assert value_of(load_spec(written(beside, "own_of_spec_a:score"))) == 1
    assert folders_in_use() == [str(beside)]


def test_a_package_below_the_spec_is_found(folders):
    beside, _ = folders
    (beside / "own_of_spec_b").mkdir()
    module(beside / "own_of_spec_b", "inner", 2)
    assert value_of(load_spec(written(beside, "own_of_spec_b.inner:score"))) == 2


def test_the_current_folder_is_searched_after_the_spec_s(folders):
    beside, current = folders
    module(current, "own_of_spec_c", "'current'")
    module(current, "own_of_spec_d", "'current'")
    module(beside, "own_of_spec_d", "'beside'")
    load_target("json:loads")  # the current folder is on the path from now on
    assert value_of(load_spec(written(beside, "own_of_spec_c:score"))) == "current"
    assert value_of(load_spec(written(beside, "own_of_spec_d:score"))) == "beside"


def test_no_module_beside_the_spec_hides_an_installed_one(folders):
    beside, _ = folders
    module(beside, "yaml", 3)
    assert load_spec(written(beside, "yaml:safe_load"))
    assert "site-packages" in sys.modules["yaml"].__file__
    assert load_target("yaml:safe_load")("1") == 1


def test_the_folder_of_an_earlier_spec_is_searched_no_more(folders, tmp_path):
    beside, current = folders
    module(beside, "own_of_spec_e", 4)
    load_spec(written(beside, "own_of_spec_e:score"))
    later = load_spec(written(current, "own_of_spec_e:score"))
    with pytest.raises(RewardError, match="there is no module 'own_of_spec_e'") as caught:
        value_of(later)
    assert str(current) in str(caught.value)
    assert "spec's folder" in str(caught.value)


def test_a_run_remembers_from_where_it_imports(folders, tmp_path):
    beside, _ = folders
    module(beside, "own_of_spec_f", 5)
    run = tmp_path / "run"
    run.mkdir()
    (run / IMPORTS_FILE).write_text(str(beside))
    assert value_of(load_spec(written(run, "own_of_spec_f:score", "spec.yaml"))) == 5
