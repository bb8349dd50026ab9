"""Engine settings and leases of functions in the test's own process."""

from rlhfless.functions.base import LeaseTerms
from rlhfless.functions.generation.engine import (
    EngineSettings,
)
from rlhfless.spec import EngineSpec, TimeoutsSpec
from rlhfless.weights.address import StoreAddress

SETTINGS = EngineSettings(
    model="model",
    tokenizer="model",
    dtype="float32",
    max_model_len=None,
    seed=0,
    trust_remote_code=False,
    device="cpu",
    store=StoreAddress("file", "store"),
    engine=EngineSpec(),
    timeouts=TimeoutsSpec(start_s=30, drain_s=5),
)


DAY_S = 86_400
LONG = LeaseTerms(DAY_S, DAY_S)
"""Longer than any test session: a function whose lease expires ends its process, which here is the test process."""
