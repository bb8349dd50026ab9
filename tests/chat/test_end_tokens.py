"""The tokens that end a response, as a model's files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless.chat.end_tokens import end_token_ids
from rlhfless.prepare.model import load_policy
from rlhfless.spec import ModelSpec


@pytest.mark.parametrize(
    ("generation", "config", "right"),
    [
        ({"eos_token_id": [7, 1]}, {"eos_token_id": 2}, (7, 1)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({"temperature": 0.5}, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": 2}, (2,)),
        (None, {}, ()),
        ("{broken", {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens_are_those_of_the_generation_config(
    tmp_path: Path, generation: Any, config: dict[str, Any], right: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (tmp_path / "generation_config.json").write_text(text)
    assert end_token_ids(str(tmp_path)) == right


def test_a_policy_has_them(model_folder: Path) -> None:
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    assert load_policy(ModelSpec(path=str(model_folder))).end_token_ids == (1, 4)
