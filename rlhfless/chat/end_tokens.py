"""The tokens at which an engine ends a response, besides the tokenizer's own."""

from __future__ import annotations

import json
from pathlib import Path


def end_token_ids(path: str) -> tuple[int, ...]:
    """Return `eos_token_id` from generation_config.json, else from config.json."""
    from transformers.utils import cached_file

    for name in ("generation_config.json", "config.json"):
        try:
            file = cached_file(path, name)
            values = json.loads(Path(file).read_text("utf-8")) if file else {}
        except (OSError, ValueError):  # no such file, or no answer; a broken file is for its own reader to refuse
            continue
        ends = values.get("eos_token_id") if isinstance(values, dict) else None
        if ends is not None:
            return tuple(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
    return ()
