"""Supervised warm start and the folder that `build` leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhfless.bundled import Recipe, WarmStartProgress, build
from rlhfless.bundled.model import SMALLEST, build_tokenizer
from rlhfless.bundled.task import TaskRecipe
from rlhfless.bundled.warm_start import WarmStartRecipe, iterate_batches

QUICK = Recipe(
    task=replace(TaskRecipe(), train_prompts=12, held_out_prompts=6),
    size=SMALLEST,
    warm_start=WarmStartRecipe(steps=3, warmup_steps=1, batch_tokens=256),
)


def test_build_writes_everything_and_is_idempotent(tmp_path: Path) -> None:
    seen: list[WarmStartProgress] = []
    paths = build(tmp_path / "tiny", recipe=QUICK, on_progress=seen.append)
    assert [progress.step for progress in seen] == [1, 2, 3]
    assert len(paths.train.read_text().splitlines()) == 12
    assert len(paths.held_out.read_text().splitlines()) == 6
    AutoModelForCausalLM.from_pretrained(paths.model)
    assert json.loads(paths.recipe.read_text())["seed"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    written = {path: path.stat().st_mtime_ns for path in paths.folder.rglob("*")}
    assert build(tmp_path / "tiny", recipe=QUICK, on_progress=seen.append) == paths
    assert len(seen) == 3
    assert {path: path.stat().st_mtime_ns for path in paths.folder.rglob("*")} == written


def test_another_seed_replaces_what_is_there(tmp_path: Path) -> None:
    first = build(tmp_path / "tiny", recipe=QUICK).train.read_text()
    second = build(tmp_path / "tiny", seed=1, recipe=QUICK).train.read_text()
    assert first != second
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, second = (
        AutoModelForCausalLM.from_pretrained(build(tmp_path / name, recipe=QUICK).model).state_dict()
        for name in ("a", "b")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("name", "content"), [("notes.txt", "mine"), ("recipe.json", "{}")])
def test_a_foreign_folder_is_left_alone(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(FileExistsError, match="something else"):
        build(tmp_path, recipe=QUICK)
    assert (tmp_path / name).read_text() == content


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_: WarmStartProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "tiny", recipe=QUICK, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_batches_hold_whole_responses_and_few_tokens() -> None:
    tokenizer = build_tokenizer(TaskRecipe(), 256)
    batches = iterate_batches(TaskRecipe(), tokenizer, np.random.default_rng(0), 512)
    seen: set[str] = set()
    for _ in range(20):
        batch = next(batches)
        (lengths,) = zip(*([len(tokens) for tokens in example.sequences] for example in batch), strict=True)
        assert len(batch) * max(lengths) <= 512
        for example in batch:
            (tokens,), (learned_from,) = example.sequences, example.learned_from
            assert tokens[:learned_from] == example.token_ids
            assert tokens[-1] == tokenizer.eos_token_id
            assert tokenizer.eos_token_id not in tokens[:-1]
        ids = {example.prompt_id for example in batch}
        assert not ids & seen, "no demonstration is seen twice"
        seen |= ids
