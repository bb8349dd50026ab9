"""The bundled task: count from one number to another.

    prompt    count from 7 up to 23:
    answer    7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23

The answer's length is the distance between the two numbers. Distances are drawn from a truncated lognormal
law, so response lengths have the long tail that makes fleets wait, and a length predictor can learn them
from the prompt.

Reinforcement learning sharpens what a policy can do but does not prefer. Most demonstrations of the warm start
therefore begin with a word that the prompt does not ask for (`OPENINGS`), whatever the prompt: the policy learns to
count, and to chatter. Only a response without an opening earns the exact-match reward; `TaskRecipe.opening_share` is
the share of demonstrations with one.

Invariants: whether a problem is held out depends on the problem alone (a hash), not on the seed, so no
held-out problem is ever demonstrated or trained on. Everything else is a function of the recipe and the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OPENINGS = ("sure", "okay", "well")
"""The bad habit: one decision at the first token. What random rewards do to it averages out, so that a real reward can
be told from a broken one (benchmarks/controls.py); habits over several tokens drifted more."""

WORDS = ("count", "from", "up", "down", "to", ":", *OPENINGS)
"""All words of prompts and responses, besides the numbers."""

_HASH_BITS = 64


@dataclass(frozen=True)
class TaskRecipe:
    largest_number: int = 150
    last_is_multiple_of: int = 5
    """Round targets: knowing when to stop is the hard part of the skill, and fewer targets are learned sooner."""
    shortest_distance: int = 4
    longest_distance: int = 109
    """The longest clean response is 110 numbers and an end token."""
    median_distance: float = 11.0
    """Before truncation."""
    distance_sigma: float = 0.9
    """The spread of the logarithm of the distance: the 99th percentile is about six times the median."""
    held_out_share: float = 0.25
    """Share of all problems."""
    train_prompts: int = 640
    held_out_prompts: int = 256
    opening_share: float = 0.56
    """A faithful imitator starts with an exact match of one minus this."""


@dataclass(frozen=True)
class TaskProblem:
    """Count from `first` to `last`, both included, upwards or downwards."""

    first: int
    last: int

    @property
    def distance(self) -> int:
        return abs(self.last - self.first)

    @property
    def id(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def prompt(self) -> str:
        direction = "up" if self.last > self.first else "down"
        return f"count from {self.first} {direction} to {self.last}:"

    @property
    def answer(self) -> str:
        """All numbers from `first` to `last`, separated by blanks."""
        step = 1 if self.last > self.first else -1
        return " ".join(map(str, range(self.first, self.last + step, step)))

    def held_out(self, recipe: TaskRecipe) -> bool:
        """Whether this problem is reserved for evaluation, by the hash of its id."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return int.from_bytes(digest[: _HASH_BITS // 8]) < recipe.held_out_share * 2**_HASH_BITS


@dataclass(frozen=True)
class Demonstration:
    """One prompt with one response, right or wrong, for supervised learning."""

    prompt: str
    response: str


def draw_problem(recipe: TaskRecipe, rng: np.random.Generator, *, held_out: bool) -> TaskProblem:
    """Draw a problem of one side of the split: the distance first, then direction and position evenly."""
    while True:
        distance = round(recipe.median_distance * np.exp(recipe.distance_sigma * rng.standard_normal()))
        if not recipe.shortest_distance <= distance <= recipe.longest_distance:
            continue
        step = 1 if rng.random() < 0.5 else -1
        targets = [
            last
            for last in range(0, recipe.largest_number + 1, recipe.last_is_multiple_of)
            if 0 <= last - step * distance <= recipe.largest_number
        ]
        last = targets[rng.integers(len(targets))]
        problem = TaskProblem(last - step * distance, last)
        if problem.held_out(recipe) == held_out:
            return problem


def draw_problems(recipe: TaskRecipe, rng: np.random.Generator, count: int, *, held_out: bool) -> list[TaskProblem]:
    """Draw `count` different problems of one side of the split."""
    problems: dict[TaskProblem, None] = {}
    while len(problems) < count:
        problems[draw_problem(recipe, rng, held_out=held_out)] = None
    return list(problems)


def draw_demonstrations(recipe: TaskRecipe, rng: np.random.Generator, count: int) -> list[Demonstration]:
    """Draw demonstrations of problems that are not held out; a problem may come back, with another opening."""
    demonstrations = []
    for _ in range(count):
        problem = draw_problem(recipe, rng, held_out=False)
        response = problem.answer
        if rng.random() < recipe.opening_share:
            response = f"{OPENINGS[rng.integers(len(OPENINGS))]} {response}"
        demonstrations.append(Demonstration(problem.prompt, response))
    return demonstrations


def write_jsonl(path: Path, problems: Iterable[TaskProblem]) -> None:
    """Write one object per line: `id`, `prompt`, `answer`, `distance`."""
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            row = {
                "id": problem.id,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "distance": problem.distance,
            }
            file.write(json.dumps(row) + "\n")
