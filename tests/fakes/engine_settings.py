"""Settings of an engine that is not started."""

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
