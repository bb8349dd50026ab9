"""How long engines take: roofline from data sheets, measured kernel tables, and fits to the run's own ledger."""

from rlhfless.scaling.latency.devices import DeviceSheet, load_devices
from rlhfless.scaling.latency.fitted import BentEngine, LatencyFit, LinearEngine
from rlhfless.scaling.latency.prior import prior_of
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.latency.startup import SleepTier, cold_start_s, wake_s

__all__ = [
    "BentEngine",
    "DeviceSheet",
    "LatencyFit",
    "LinearEngine",
    "ModelShape",
    "Roofline",
    "SleepTier",
    "cold_start_s",
    "load_devices",
    "prior_of",
    "wake_s",
]
