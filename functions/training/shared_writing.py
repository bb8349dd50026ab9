"""Publish a version by all ranks of a learner that divide its experts: each writes its own to the store's folder.

Rank 0 gathers and writes everything else. It needs neither the memory nor the time to gather all experts, which are
most of a model's bytes. All ranks must see the folder; otherwise rank 0 gathers experts as well, a layer at a time.
All functions are collective.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhfless.functions.training.checkpoint import Savers, drain
from rlhfless.records import WeightSample
from rlhfless.weights.coauthors import Begun, write_share
from rlhfless.weights.digest import PieceHash
from rlhfless.weights.files import TensorStream


def all_see(folder: Path, ranks: Savers) -> bool:
    """Return whether all ranks see the same folder. *Collective.*"""
    mark = folder / f".seen-{ranks.all(uuid.uuid4().hex)[0]}"
    try:
        if ranks.first:
            with contextlib.suppress(OSError):
                mark.touch()
        ranks.all(None)
        return all(ranks.all(mark.exists()))
    finally:
        if ranks.first:
            mark.unlink(missing_ok=True)


class SharedWriting:
    """One version, written by all ranks. Rank 0 passes this to the store as its coauthors.

    `end` must be called on every rank, also after an error: the ranks send each other parts of the stream.
    """

    def __init__(
        self, stream: TensorStream, samples: dict[str, WeightSample], of_piece: PieceHash, ranks: Savers
    ) -> None:
        """`stream` yields the tensors that this rank writes. On rank 0, `samples` gets those of all ranks."""
        self._stream = stream
        self._samples = samples
        self._of_piece = of_piece
        self._ranks = ranks
        self._begun = self._collected = False

    def begin(self, begun: Begun | None) -> None:
        """Tell the other ranks where to write; None if there is nothing to write to."""
        self._begun = True
        self._ranks.all(begun)

    def hashes(self) -> Mapping[str, bytes]:
        """Wait for all ranks, and return the hashes of their tensors. Raises OSError if one could not write."""
        drain(self._stream)  # after an error of this rank's; otherwise it is exhausted
        self._collected = True
        found: list[Any] = self._ranks.all(None)
        for failure, _, _ in found[1:]:
            if failure is not None:
                raise OSError(*failure)
        for _, _, samples in found[1:]:
            self._samples |= samples
        return {name: known for _, hashes, _ in found[1:] for name, known in hashes.items()}

    def end(self) -> None:
        """On rank 0, release the others if the store did not. On the others, write this rank's tensors."""
        if not self._ranks.first:
            self._write()
            return
        if not self._begun:
            self.begin(None)
        if not self._collected:
            with contextlib.suppress(OSError):  # the first error is already on its way
                self.hashes()

    def _write(self) -> None:
        begun: Begun | None = self._ranks.all(None)[0]
        hashes: Mapping[str, bytes] = {}
        failure: tuple[int | None, str] | None = None
        try:
            if begun is not None:
                hashes = write_share(begun, self._stream, self._of_piece)
        except OSError as error:
            failure = (error.errno, f"a rank of the learner cannot write its experts: {error.strerror}")
        finally:
            drain(self._stream)
        self._ranks.all((failure, hashes, self._samples))
