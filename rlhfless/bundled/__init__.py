"""A task and a policy that come with the package, so that a first run needs no download and no accelerator.

`build` creates a counting task (`task`) and a policy of half a million parameters (`model`) that has learned the task
from demonstrations with bad habits (`warm_start`), so reinforcement learning has something real to correct.

    folder/
      model/          the policy and its tokenizer, Hugging Face format
      train.jsonl     prompts to train on: id, prompt, answer, distance
      heldout.jsonl   prompts for evaluation, never trained on nor demonstrated
      recipe.json     what the folder was built from

A folder is complete or absent: it is written under a temporary name and renamed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from rlhfless.bundled.model import ModelSize, build_random
from rlhfless.bundled.safe import SafeRecipe
from rlhfless.bundled.task import TaskRecipe, write_jsonl
from rlhfless.bundled.warm_start import WarmStartProgress, WarmStartRecipe, train_policy

__all__ = ["BundledPaths", "Recipe", "WarmStartProgress", "WarmStartRecipe", "agent", "build", "build_random"]

FORMAT_VERSION = 2
"""Raise it when code, rather than a constant of the recipe, changes the output."""


@dataclass(frozen=True)
class Recipe:
    """All constants, except the seed, that determine the output of `build`."""

    task: TaskRecipe | SafeRecipe = field(default_factory=TaskRecipe)
    size: ModelSize = field(default_factory=ModelSize)
    warm_start: WarmStartRecipe = field(default_factory=WarmStartRecipe)

    def digest(self, seed: int) -> str:
        """Return a hash of all constants and the seed."""
        constants = {"format": FORMAT_VERSION, "seed": seed, **asdict(self)}
        return hashlib.sha256(json.dumps(constants, sort_keys=True).encode()).hexdigest()


def agent() -> Recipe:
    """Return the recipe of the task that needs an environment: see rlhfless.bundled.safe."""
    size = ModelSize(hidden=64, mlp=128, max_positions=64)
    return Recipe(SafeRecipe(), size, WarmStartRecipe(steps=600))


@dataclass(frozen=True)
class BundledPaths:
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "heldout.jsonl"

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.json"


def build(
    folder: Path,
    *,
    seed: int = 0,
    recipe: Recipe | None = None,
    on_progress: Callable[[WarmStartProgress], None] | None = None,
) -> BundledPaths:
    """Build the bundled task and policy in `folder`, unless they exist. Output of another recipe or seed is replaced.

    Raises FileExistsError if `folder` holds anything else.
    """
    recipe = recipe or Recipe()
    paths = BundledPaths(folder)
    digest = recipe.digest(seed)
    if _digest_of(paths) == digest:
        return paths
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new = BundledPaths(Path(scratch) / "new")
        _write(new, seed, recipe, digest, on_progress)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.folder.rename(folder)
    return paths


def _digest_of(paths: BundledPaths) -> str | None:
    """Return the digest of a finished folder; None if the folder is missing or empty."""
    if not paths.folder.exists() or (paths.folder.is_dir() and not any(paths.folder.iterdir())):
        return None
    if paths.recipe.is_file():
        digest = json.loads(paths.recipe.read_text(encoding="utf-8")).get("digest")
        if isinstance(digest, str):
            return digest
    raise FileExistsError(f"{paths.folder} holds something else; name a new or empty folder")


def _write(
    paths: BundledPaths,
    seed: int,
    recipe: Recipe,
    digest: str,
    on_progress: Callable[[WarmStartProgress], None] | None,
) -> None:
    paths.folder.mkdir()
    rng = np.random.default_rng(seed)
    for path, count, held_out in (
        (paths.train, recipe.task.train_prompts, False),
        (paths.held_out, recipe.task.held_out_prompts, True),
    ):
        write_jsonl(path, recipe.task.problems(rng, count, held_out=held_out))
    train_policy(
        paths.model, seed, task=recipe.task, size=recipe.size, recipe=recipe.warm_start, on_progress=on_progress
    )
    record = {"digest": digest, "seed": seed, **asdict(recipe)}
    paths.recipe.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
