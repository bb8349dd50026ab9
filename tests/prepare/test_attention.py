"""A model that is computed with eager attention is told before a run, with what its scores take."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Gemma2Config

from rlhfless.prepare.model import attention_warnings
from rlhfless.spec import RunSpec


@pytest.mark.parametrize(
    ("cap", "micro_batch_tokens", "gib"), [(50.0, 1024, "4"), (50.0, 65536, "32"), (None, 1024, "")]
)
def test_scores_are_told(cap: float | None, micro_batch_tokens: int, gib: str, tmp_path: Path) -> None:
    Gemma2Config(num_attention_heads=16, attn_logit_softcapping=cap).save_pretrained(tmp_path)
    values = {
        "model": {"path": str(tmp_path)},
        "prompts": {"path": "rows.jsonl"},
        "rewards": [{"type": "exact_match"}],
        "learner": {"micro_batch_tokens": micro_batch_tokens},
    }
    found = attention_warnings(RunSpec.model_validate(values), 8192)
    assert len(found) == bool(gib)
    for warning in found:
        assert f"take {gib} GiB in each layer" in warning
        assert "soft cap (attn_logit_softcapping: 50)" in warning


def test_a_model_of_other_code_is_decided_at_load(tmp_path: Path) -> None:
    config = Gemma2Config(num_attention_heads=16, attn_logit_softcapping=None)
    config.auto_map = {"AutoModelForCausalLM": "own.Own"}
    config.save_pretrained(tmp_path)
    values = {"model": {"path": str(tmp_path)}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    (warning,) = attention_warnings(RunSpec.model_validate(values), 8192)
    assert "may be trained (decided at load) with transformers' eager attention" in warning
