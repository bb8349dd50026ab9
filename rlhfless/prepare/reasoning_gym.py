"""Prompt files of reasoning-gym's tasks (extra `reasoning-gym`): generated, verified, and scored without a network."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless.rewards.reasoning_gym import entry_of
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest
from rlhfless.util.errors import first_line

INSTRUCTION = "Put your final answer between <answer> and </answer>."
TRAIN, HELD_OUT = "train.jsonl", "heldout.jsonl"


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """What was written."""

    train: Path
    held_out: Path | None
    train_rows: int
    held_out_rows: int


def write_task(
    name: str,
    folder: Path,
    *,
    rows: int,
    held_out: int,
    seed: int,
    settings: Mapping[str, Any],
    instruction: str = INSTRUCTION,
) -> TaskFiles:
    """Write rows of a task, and held-out rows with other questions.

    Each has `id`, `prompt`, `answer` (empty if many are right), and `entry` for the scorer. Raises InputError.
    """
    questions = set[str]()
    written: list[dict[str, Any]] = []
    for index, entry in enumerate(_entries(name, rows + held_out, seed, settings)):
        question = str(entry["question"])
        if index >= rows and question in questions:
            continue
        questions.add(question)
        prompt = f"{question}\n\n{instruction}" if instruction else question
        answer = "" if entry["answer"] is None else str(entry["answer"])
        written.append({"id": f"{name}-{index}", "prompt": prompt, "answer": answer, "entry": repr(entry)})
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TRAIN, written[:rows])
    if held_out:
        _write(folder / HELD_OUT, written[rows:])
    return TaskFiles(
        folder / TRAIN, folder / HELD_OUT if held_out else None, min(rows, len(written)), len(written[rows:])
    )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def _entries(name: str, size: int, seed: int, settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield entries that their scorer reads back as they are. Raises InputError."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise _refused("", "the package `reasoning-gym` is not installed", "pip install 'rlhfless[reasoning-gym]'")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        hint = nearest(name, DATASETS) + f"There are {len(DATASETS)}: {', '.join(sorted(DATASETS))}"
        raise _refused("TASK", f"{name!r} is no task of reasoning-gym", hint)
    try:
        made = reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        hint = f"its settings are those of reasoning_gym's `{name}`"
        raise _refused("--set", first_line(error) or type(error).__name__, hint) from error
    for entry in made:
        try:
            same = entry_of(repr(entry)) == entry
        except (ValueError, SyntaxError):
            same = False
        if not same:
            hint = "use another task"
            raise _refused("TASK", f"the entries of {name!r} hold objects that a file cannot", hint)
        yield entry


def _refused(where: str, what: str, hint: str) -> InputError:
    return InputError("reasoning-gym", [Problem(where, what, hint)])
