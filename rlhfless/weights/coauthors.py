"""Several processes write one version: each the tensors that it has, at their places in the publisher's draft.

The publisher begins a draft, tells its coauthors where, writes its own tensors, and collects their hashes. A version
still becomes visible at once, when the publisher renames the finished draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhfless.weights.digest import PieceHash
from rlhfless.weights.files import TensorStream, write_pieces
from rlhfless.weights.parts import joining


@dataclass(frozen=True, slots=True)
class Begun:
    """Where coauthors write."""

    folder: str
    """The draft, in a folder that all of them see."""
    begins: int
    """Offset of the first tensor in bytes."""


class Coauthors(Protocol):
    """The publisher's side."""

    def begin(self, begun: Begun) -> None:
        """Tell the coauthors where to write."""
        ...

    def hashes(self) -> Mapping[str, bytes]:
        """Wait until all tensors of others are written, and return their hashes. Raises OSError if one failed."""
        ...


def write_share(begun: Begun, share: TensorStream, of_piece: PieceHash) -> Mapping[str, bytes]:
    """Write the tensors of `share`, whose layout is that of the whole version, and return their hashes.

    Raises OSError, and ValueError for a tensor that is not the one of its layout.
    """
    hashes: dict[str, bytes] = {}
    with joining(Path(begun.folder)) as draft:
        write_pieces(draft.put, share, begun.begins, lambda name, known, _: hashes.__setitem__(name, known), of_piece)
    return hashes
