"""Any text can be stored and shown, and secrets are redacted; other texts stay as they are."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.builders import ANY_TEXT
from rlhfless.spec import RunSpec
from rlhfless.util.text import HIDDEN, legible, redacted, storable, storable_values, tolerant


def test_what_is_shown_of_what_cannot_be_stored() -> None:
    assert storable("a\udcffb\ud800\0é") == "a\\udcffb\\ud800\\x00é"
    assert legible("red \x1b[31m\r\x9b\x7f\tend\n") == "red \\x1b[31m\\x0d\\x9b\\x7f\tend\n"


@given(ANY_TEXT)
def test_every_text_becomes_storable_and_legible(text: str) -> None:
    stored, shown = storable(text), legible(text)
    assert stored.encode().decode() == stored
    assert shown.encode().decode() == shown
    assert "\0" not in stored
    assert all(character.isprintable() or ord(character) > 0x9F or character in "\t\n" for character in shown)
    assert (storable(stored), legible(shown)) == (stored, shown)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_text_that_can_be_stored_is_not_touched(text: str) -> None:
    assert storable(text) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=10,
)


@given(VALUES)
def test_nested_values_keep_their_shape(value: object) -> None:
    found = storable_values(value)
    json.dumps(found, ensure_ascii=False).encode()
    assert type(found) is type(value)
    assert storable_values(found) == found


@given(ANY_TEXT)
def test_a_tolerant_stream_takes_every_text_in_its_encoding(text: str) -> None:
    for encoding in ("ascii", "latin-1", "utf-8"):
        written = io.BytesIO()
        stream = tolerant(io.TextIOWrapper(written, encoding=encoding, newline="\n"))
        stream.write(text)
        stream.flush()
        written.getvalue().decode(encoding)


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
