"""Redacts secrets in displayed and stored values: values of keys with secret names, and passwords in URLs."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

_SECRET_KEY = re.compile(r"(?i)(^|_|-)(token|secret|password|passwd|api_?key|authorization|credentials?)s?$")
_USER_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/?#'\"]+@")
_SECRET_IN_QUERY = re.compile(r"(?i)([?&](?:[\w-]*(?:token|secret|password|signature|api_?key))=)[^&\s'\"]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
_OWN_KEY = re.compile(r"\brlk_[\w-]{8,}")


def redacted(value: Any) -> Any:
    """Return the value with its secrets replaced by ***."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if _is_secret(key, inner) else redacted(inner)
            for key, inner in value.items()
        }  # fmt: skip
    if type(value) in (list, tuple):
        return type(value)(map(redacted, value))
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return a text, such as a message or log lines, with its secrets replaced by ***."""
    text = _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _SECRET_IN_QUERY.sub(rf"\1{HIDDEN}", text)
    return _OWN_KEY.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", text))


def _is_secret(key: Any, value: Any) -> bool:
    # Counts of tokens are not secrets: max_tokens: 512, micro_batch_tokens: auto.
    return isinstance(key, str) and isinstance(value, str) and value != "auto" and bool(_SECRET_KEY.search(key))


def user_in(url: str) -> bool:
    """Return whether a URL has a user or password before its host."""
    return bool(_USER_IN_URL.match(url))
