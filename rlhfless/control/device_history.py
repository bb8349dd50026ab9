"""The recent work of runs on devices. It is kept in memory and ends with the service; traces have all of it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from rlhfless.control.objects.fleet import DevicesTimelineObject, DeviceWork, RunBar, SharedDeviceRow

KEPT_S = 3600.0
MOST_PER_DEVICE = 2000
"""Most bars of a device, of some 200 bytes each: an hour of phases of 2 s."""


class DeviceHistory:
    """The work of all runs, by device of the cluster."""

    def __init__(self) -> None:
        self._bars: dict[str, deque[RunBar]] = defaultdict(lambda: deque(maxlen=MOST_PER_DEVICE))

    def add(self, run_id: str, worked: Sequence[DeviceWork], now_s: float) -> None:
        """Add the work that a driver reports, and forget work older than KEPT_S."""
        for work in worked:
            for device in work.devices:
                self._bars[device].append(RunBar(run_id=run_id, **work.model_dump(exclude={"devices"})))
        for device, bars in list(self._bars.items()):
            while bars and bars[0].end_s < now_s - KEPT_S:
                bars.popleft()
            if not bars:
                del self._bars[device]

    def since(self, since_s: float) -> DevicesTimelineObject:
        """All devices with the work that ended after `since_s`."""
        rows = [(device, [bar for bar in bars if bar.end_s > since_s]) for device, bars in sorted(self._bars.items())]
        return DevicesTimelineObject(rows=[SharedDeviceRow(device=device, bars=bars) for device, bars in rows if bars])
