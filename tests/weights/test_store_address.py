"""A folder that is meant to be one for all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfless.functions.learner.controller import StoreHome
from rlhfless.weights.address import StoreAddress, StoreNotShared


def test_a_folder_that_the_learner_does_not_write_to_is_named_with_its_node(tmp_path: Path) -> None:
    address = StoreAddress("file", str(tmp_path / "store"))
    with pytest.raises(StoreNotShared, match=r"transport is file, but '.*store' on node .* Set weights\.transport"):
        address.require_shared()
    StoreHome(address.folder).open("127.0.0.1")
    address.require_shared()
    StoreAddress("http", str(tmp_path / "cache"), "token").require_shared()  # each node has its own
