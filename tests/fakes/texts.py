"""Any text."""

from __future__ import annotations

import os

from hypothesis import strategies as st

TEXTS = st.text(alphabet=st.characters(exclude_categories=()))
"""Lone surrogates and control characters among them."""


ANY_TEXT = TEXTS | st.binary().map(os.fsdecode)
"""Or names of files that are not UTF-8."""
