"""Where files of this repository lie, from tests at any depth."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FAKES = TESTS / "fakes"
EXAMPLES = ROOT / "examples"
SCENARIOS = EXAMPLES / "scenarios"
