"""The bundled task: count from one number to another.

    prompt    count from 7 up to 23:
    answer    7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23

The answer's length is the distance between the two numbers. Distances are sampled from a truncated lognormal
distribution, so response lengths have the long tail that makes fleets wait, and a length predictor can learn them from
the prompt.

Reinforcement learning sharpens skills that a policy has but does not prefer. Most demonstrations of the warm start
therefore start with a word that the prompt does not ask for (`OPENINGS`), so the policy learns both to count and to
chatter. Only a response without an opening earns the exact-match reward; `TaskRecipe.opening_share` is the share of
demonstrations with an opening.

Invariants: whether a problem is held out depends on the problem alone (a hash) and not on the seed, so no held-out
problem is ever demonstrated or trained on. Everything else is a function of the recipe and the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

OPENINGS = ("sure", "okay", "well")
"""The bad habit: a single decision at the first token. The effect of random rewards on it averages out, which
distinguishes a real reward from a broken one (benchmarks/controls.py). Habits over several tokens drifted more."""

WORDS = ("count", "from", "up", "down", "to", ":", *OPENINGS)
"""All words of prompts and responses, besides the numbers."""

_HASH_BITS = 64


@dataclass(frozen=True)
class TaskRecipe:
    largest_number: int = 150
    last_is_multiple_of: int = 5
    """Targets are round, because knowing when to stop is the hard part of the skill, and fewer targets are learned
    sooner."""
    shortest_distance: int = 4
    longest_distance: int = 109
    """The longest clean response has 110 numbers and an end token."""
    median_distance: float = 11.0
    """Median of the distance before truncation."""
    distance_sigma: float = 0.9
    """Standard deviation of the logarithm of the distance: the 99th percentile is about six times the median."""
    held_out_share: float = 0.25
    """Share of all problems that are held out."""
    train_prompts: int = 640
    held_out_prompts: int = 256
    opening_share: float = 0.56
    """A faithful imitator starts with an exact-match rate of one minus this share."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words of prompts and responses."""
        return (*WORDS, *map(str, range(self.largest_number + 1)))

    def problems(self, rng: np.random.Generator, count: int, *, held_out: bool) -> list[TaskProblem]:
        """See BundledTask."""
        return draw_problems(self, rng, count, held_out=held_out)

    def demonstrations(self, rng: np.random.Generator, count: int) -> list[Demonstration]:
        """See BundledTask."""
        return draw_demonstrations(self, rng, count)


@dataclass(frozen=True)
class TaskProblem:
    """Count from `first` to `last`, both included, up or down."""

    first: int
    last: int

    @property
    def distance(self) -> int:
        return abs(self.last - self.first)

    @property
    def id(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def row(self) -> dict[str, Any]:
        """The row of the data set."""
        return {"id": self.id, "prompt": self.prompt, "answer": self.answer, "distance": self.distance}

    @property
    def prompt(self) -> str:
        direction = "up" if self.last > self.first else "down"
        return f"count from {self.first} {direction} to {self.last}:"

    @property
    def answer(self) -> str:
        """All numbers from `first` to `last`, separated by spaces."""
        step = 1 if self.last > self.first else -1
        return " ".join(map(str, range(self.first, self.last + step, step)))

    def held_out(self, recipe: TaskRecipe) -> bool:
        """Return whether this problem is reserved for evaluation, by the hash of its id."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return int.from_bytes(digest[: _HASH_BITS // 8]) < recipe.held_out_share * 2**_HASH_BITS


@dataclass(frozen=True)
class Demonstration:
    """One prompt with one response, right or wrong, for supervised learning."""

    prompt: str
    response: str
    later: tuple[tuple[str, str], ...] = ()
    """Further turns: what an environment says, and the response to it."""


class BundledTask(Protocol):
    """A task that comes with the package."""

    @property
    def train_prompts(self) -> int: ...

    @property
    def held_out_prompts(self) -> int: ...

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words of prompts and responses."""

    def problems(self, rng: np.random.Generator, count: int, *, held_out: bool) -> Sequence[BundledProblem]:
        """Sample different problems of one side of the split."""

    def demonstrations(self, rng: np.random.Generator, count: int) -> Sequence[Demonstration]:
        """Sample demonstrations of problems that are not held out."""


class BundledProblem(Protocol):
    """A problem of a task."""

    @property
    def row(self) -> Mapping[str, Any]:
        """The row of the data set."""


def draw_problem(recipe: TaskRecipe, rng: np.random.Generator, *, held_out: bool) -> TaskProblem:
    """Sample a problem of one side of the split: first the distance, then direction and position uniformly."""
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
    """Sample `count` different problems of one side of the split."""
    problems: dict[TaskProblem, None] = {}
    while len(problems) < count:
        problems[draw_problem(recipe, rng, held_out=held_out)] = None
    return list(problems)


def draw_demonstrations(recipe: TaskRecipe, rng: np.random.Generator, count: int) -> list[Demonstration]:
    """Sample demonstrations of problems that are not held out. A problem may repeat with another opening."""
    demonstrations = []
    for _ in range(count):
        problem = draw_problem(recipe, rng, held_out=False)
        response = problem.answer
        if rng.random() < recipe.opening_share:
            response = f"{OPENINGS[rng.integers(len(OPENINGS))]} {response}"
        demonstrations.append(Demonstration(problem.prompt, response))
    return demonstrations


def write_jsonl(path: Path, problems: Iterable[BundledProblem]) -> None:
    """Write the row of each problem as one object per line."""
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(problem.row) + "\n")
