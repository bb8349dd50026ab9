"""The option `--smoke`."""

import argparse
import sys

import pytest
from smoke import parsed


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("names", nargs="*")
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--trl-steps", type=int, default=2)
    return made


@pytest.mark.parametrize(
    ("line", "rounds", "trl_steps", "names"),
    [
        ("", 10, 2, []),
        ("--smoke", 1, 0, ["one"]),
        ("two --rounds 3 --smoke", 3, 0, ["two"]),
    ],
)
def test_what_is_given_wins(
    line: str, rounds: int, trl_steps: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *line.split()])
    arguments = parsed(parser(), rounds=1, trl_steps=0, names=["one"])
    assert (arguments.rounds, arguments.trl_steps, arguments.names) == (rounds, trl_steps, names)


def test_a_size_without_an_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(ValueError, match="'steps', which is no option"):
        parsed(parser(), steps=1)
