"""The card of a data set, which may name its files by URL: `datasets` would fetch any, also of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from rlhfless.spec.locations import is_path

_HUB_ANSWER_S = 10.0
_CARDS = ("README.md", ".huggingface.yaml")
_FILES = ("data_files", "data_dir")


def foreign_files(name: str) -> tuple[str | None, str]:
    """The revision that was looked at (None of a folder), and the first file of the data set that is not in it.

    `name`: a folder, or a name of the hub. Raises what `huggingface_hub` raises.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    cards, revision = [], None
    if is_path(name):
        cards = [Path(name, card) for card in _CARDS]
    elif not constants.HF_HUB_OFFLINE:  # else only what was loaded before is there
        revision = HfApi().dataset_info(name, timeout=_HUB_ANSWER_S).sha
        for card in _CARDS:
            with contextlib.suppress(EntryNotFoundError):
                cards.append(Path(hf_hub_download(name, card, repo_type="dataset", revision=revision)))
    texts = [text for card in cards if card.is_file() for text in _named(_values(card))]
    return revision, next((text for text in texts if _is_foreign(text)), "")


def _values(card: Path) -> Any:
    from huggingface_hub import DatasetCard

    if card.suffix == ".md":
        return DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict()
    return yaml.safe_load(card.read_text("utf-8"))


def _named(values: Any, within: bool = False) -> Iterator[str]:
    """Texts below the keys that name files, at any depth."""
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from _named(inner, within or key in _FILES)
    elif isinstance(values, list):
        for inner in values:
            yield from _named(inner, within)
    elif within and isinstance(values, str):
        yield values


def _is_foreign(text: str) -> bool:
    text = unquote(text)
    return "://" in text or "::" in text or text.startswith(("/", "~")) or ".." in text.split("/")
