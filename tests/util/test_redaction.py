"""Secrets are hidden by the names of their keys; counts of tokens are not secrets."""

from __future__ import annotations

import pytest

from rlhfless.spec import RunSpec
from rlhfless.util.redaction import HIDDEN, redacted


def test_a_spec_without_secrets_stays_as_it_is() -> None:
    spec = RunSpec.model_validate(
        {
            "model": {"path": "m"},
            "prompts": {"path": "/rows.jsonl"},
            "rewards": [{"type": "exact_match"}],
            "generation": {"engine": {"max_batch_tokens": "auto"}},
            "learner": {"micro_batch_tokens": "auto"},
        }
    ).model_dump(mode="json")
    assert redacted(spec) == spec


@pytest.mark.parametrize("key", ["token", "hf_token", "auth_tokens", "api_key", "password", "client-secret"])
def test_texts_under_names_of_secrets_are_hidden(key: str) -> None:
    assert redacted({"outer": [{key: "abc"}]}) == {"outer": [{key: HIDDEN}]}
