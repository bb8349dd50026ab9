"""The faults of a simulated cluster, beyond the interruptions of spot actors (`ActorShape.spot_mean_s`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of one replica: it dies, or stops answering."""

    turn: int
    """The turn of the event loop at which it happens, so that it hits any await, also one that takes no time."""
    choice: int
    """Chooses the replica: an index into those that are there, modulo their number."""
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedFaults:
    slow_share: float = 0.0
    """Share of calls that are slow."""
    slow_s: float = 0.0
    """Mean delay of a slow call; delays are exponential."""
    lost_share: float = 0.0
    """Share of calls that are executed, but whose answer never arrives."""
    beat_s: float = math.inf
    """Seconds between two heartbeats of a generation stream."""
    late_share: float = 0.0
    """Share of heartbeats that are late."""
    late_s: float = 0.0
    """Mean delay of a late heartbeat; delays are exponential."""
    strikes: tuple[Strike, ...] = ()


NO_FAULTS = SimulatedFaults()


class DrawnFaults:
    """Draws which calls and heartbeats are slow, late or lost."""

    def __init__(self, faults: SimulatedFaults, seed: int) -> None:
        self.faults = faults
        self._random = Random(seed)

    def delay_s(self) -> float:
        """Return the seconds by which a call is late."""
        return self._delay_s(self.faults.slow_share, self.faults.slow_s)

    def beat_s(self) -> float | None:
        """Return the seconds until the next heartbeat; None if there are none."""
        beat_s = self.faults.beat_s
        return None if math.isinf(beat_s) else beat_s + self._delay_s(self.faults.late_share, self.faults.late_s)

    def loses_answer(self) -> bool:
        """Return whether the answer to a call is lost."""
        return self.faults.lost_share > 0 and self._random.random() < self.faults.lost_share

    def _delay_s(self, share: float, mean_s: float) -> float:
        if share <= 0 or self._random.random() >= share:
            return 0.0
        return self._random.expovariate(1 / mean_s)
