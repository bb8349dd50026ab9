"""Tool schemas and every way to break an environment's contract."""

import dataclasses
import queue  # noqa: F401
import sys
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fakes.repository import ROOT
from rlhfless.environments.contract import EnvironmentSource, InvalidCall, checked
from rlhfless.environments.loading import load
from rlhfless.spec.errors import InputError


@dataclasses.dataclass
class Point:
    x: int
    title: str = "a"


class Shop:
    """All kinds of arguments."""

    def reset(self, seed: int, row: dict) -> None: ...

    def buy(
        self,
        item: Literal["tea", "milk"],
        count: Annotated[int, Field(ge=1, description="how many")] = 1,
        where: Point | None = None,
    ) -> str:
        """Buy something.

        It is put in the cart.
        """
        return f"{count} {item} {where}"

    async def look(self) -> str:
        """Look around."""
        return ""

    def _helper(self, anything): ...


def test_the_schema_of_a_tool_says_what_its_hints_and_docstring_say():
    environment = checked("shop:Shop", Shop)
    buy, look = environment.description.tools
    assert look["function"] == {
        "name": "look",
        "description": "Look around.",
        "parameters": {"type": "object", "properties": {}},
    }
    assert buy == {
        "type": "function",
        "function": {
            "name": "buy",
            "description": "Buy something.\n\nIt is put in the cart.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"enum": ["tea", "milk"], "type": "string"},
                    "count": {"default": 1, "description": "how many", "minimum": 1, "type": "integer"},
                    "where": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None},
                },
                "required": ["item"],
                "$defs": {
                    "Point": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"x": {"type": "integer"}, "title": {"default": "a", "type": "string"}},
                        "required": ["x"],
                    }
                },
            },
        },
    }


def test_arguments_arrive_as_the_hints_say_and_defaults_stay_the_methods_own():
    buy = checked("shop:Shop", Shop).tools["buy"]
    assert buy.checked({"item": "tea", "count": "2", "where": {"x": 3}}) == {
        "item": "tea",
        "count": 2,
        "where": Point(3),
    }
    assert buy.checked({"item": "milk"}) == {"item": "milk"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "item: Field required"),
        ({"item": "beer"}, "'tea' or 'milk'"),
        ({"item": "tea", "count": 0}, "greater than or equal to 1"),
        ({"item": "tea", "size": 3}, "size: Extra inputs are not permitted"),
        ([1], "must be a JSON object, got [1]"),
        ("tea", "must be a JSON object"),
    ],
)
def test_wrong_arguments_are_the_models_fault(given, words):
    with pytest.raises(InvalidCall) as error:
        checked("shop:Shop", Shop).tools["buy"].checked(given)
    assert words in str(error.value)


def method(source: str) -> type:
    """A class with `reset` and this method."""
    scope: dict = {}
    exec("class Broken:\n    def reset(self, seed: int, row: dict): ...\n    replayable = False\n" + source, scope)
    return scope["Broken"]


@pytest.mark.parametrize(
    ("source", "where", "words"),
    [
        ("    def f(self, a): 'x'", "f.a", "has no type hint"),
        ("    def f(self, a: int): ...", "f", "has no docstring"),
        ("    def f(self, *a: int): 'x'", "f.a", "cannot be filled by name"),
        ("    def f(self, a: int, /): 'x'", "f.a", "cannot be filled by name"),
        ("    def f(self, a: 'Missing'): 'x'", "f", "type hint that cannot be read"),
        ("    def f(self, a: object()): 'x'", "f", "no JSON schema"),
        ("    def f(self, a: type(lambda: 1)): 'x'", "f", "no JSON schema"),
        ("    def f(self, _a: int): 'x'", "f", "cannot be an argument's name"),
        ("    @staticmethod\n    def f(a: int): 'x'", "f", "is a staticmethod"),
        ("    @classmethod\n    def f(cls, a: int): 'x'", "f", "is a classmethod"),
        ("", "", "neither a tool nor `observe`"),
        ("    def observe(self): ...", "observe", "has the parameters (self)"),
        ("    def observe(self, text): ...\n    def snapshot(self): ...", "restore", "is missing, and there is"),
        ("    def observe(self, text): ...\n    replayable = 'yes'", "replayable", "is 'yes'"),
        ("    def observe(self, text): ...\n    done = True", "done", "is a bool"),
        ("    def observe(self, text): ...\n    def __init__(self, a): ...", "__init__", "requires `a`"),
        ("    def call(self, name, arguments): ...", "tools", "is missing"),
        ("    reset = None\n    def observe(self, text): ...", "reset", "is missing"),
    ],
)
def test_a_broken_contract_names_field_value_and_hint(source, where, words):
    with pytest.raises(InputError) as error:
        checked("x:Broken", method(source))
    problem = error.value.problems[0]
    assert (problem.where, words in problem.what, bool(problem.hint)) == (where, True, True), str(problem)


def test_a_loop_of_ones_own_is_an_async_function_of_task_and_model():
    async def play(task, model): ...

    def blocking(task, model): ...

    assert checked("x:play", play).description.plays
    with pytest.raises(InputError, match="async def play"):
        checked("x:blocking", blocking)


GAME = "class Game:\n    def reset(self, seed: int, row: dict): ...\n    def observe(self, text: str): ...\n"


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        (GAME + GAME.replace("Game", "Other"), "game.py", "it has 2: Game, Other"),
        (GAME, "game.py:Gam", "did you mean `Game`?"),
        ("x = 1", "game.py", "no class with `reset"),
        ("x = 1", "game.py:x", "is a int"),
        ("import nothing_like_it", "game.py", "No module named 'nothing_like_it'"),
        (GAME, "other.py", "no such file"),
        (GAME, "game", "write `module:Class`"),
        (GAME, "gamee:Game", "there is no module 'gamee'"),
    ],
)
def test_targets_that_name_no_environment(tmp_path, monkeypatch, text, target, words):
    (tmp_path / "game.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        load(EnvironmentSource(target))
    assert words in str(error.value)


def test_the_tutorial_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "environments" / "guess.py").read_text()
    code = example.partition("\n\n")[2].partition("\n\n")[2]
    assert code in (ROOT / "docs" / "environments.md").read_text()
    assert load(EnvironmentSource(str(ROOT / "examples" / "environments" / "guess.py"))).description.replayable


def test_a_file_does_not_hide_a_module_of_its_name(tmp_path):
    file = tmp_path / "queue.py"
    file.write_text("from __future__ import annotations\nfrom typing import Annotated\n" + GAME)
    before = sys.modules["queue"]
    assert load(EnvironmentSource(str(file))).description.observes
    assert sys.modules["queue"] is before


def test_a_file_with_one_environment_needs_no_name_and_its_digest_follows_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    first = load(EnvironmentSource("game.py")).description
    assert (first.observes, first.ends, first.snapshots, first.replayable) == (True, False, False, False)
    (tmp_path / "game.py").write_text(GAME + "# changed\n")
    assert load(EnvironmentSource("game.py:Game")).description.digest != first.digest
