"""What runs did on devices lately. In memory: a service that starts again begins anew, and traces have all of it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from rlhfless.control.objects.fleet import DevicesTimelineObject, DeviceWork, RunBar, SharedDeviceRow

KEPT_S = 3600.0
MOST_PER_DEVICE = 2000
"""Bars of a device that are kept, some 200 bytes each: an hour of phases of 2 s."""


class DeviceHistory:
    """By device of the cluster, the work of all runs on it."""

    def __init__(self) -> None:
        self._bars: dict[str, deque[RunBar]] = defaultdict(lambda: deque(maxlen=MOST_PER_DEVICE))

    def add(self, run_id: str, worked: Sequence[DeviceWork], now_s: float) -> None:
        """What a driver has said; what is older than KEPT_S is forgotten."""
        for one in worked:
            for device in one.devices:
                self._bars[device].append(RunBar(run_id=run_id, **one.model_dump(exclude={"devices"})))
        for device, bars in list(self._bars.items()):
            while bars and bars[0].end_s < now_s - KEPT_S:
                bars.popleft()
            if not bars:
                del self._bars[device]

    def since(self, since_s: float) -> DevicesTimelineObject:
        """All devices with the work that ended later than that."""
        rows = [(device, [bar for bar in bars if bar.end_s > since_s]) for device, bars in sorted(self._bars.items())]
        return DevicesTimelineObject(rows=[SharedDeviceRow(device=device, bars=bars) for device, bars in rows if bars])
