"""The real message loop around a fake engine that is fast and can hang or die on request."""

# ruff: noqa: E402
import os
import time

# Printed before the imports, which may take as long as the deadline of an abandoned start.
print("INFO 11-25 00:00:00 [utils.py:1] Free memory on device (79/79 GiB)", flush=True)

from rlhfless.functions.generation.engine import LoadReport, Sampled, SampleRequest
from rlhfless.functions.generation.vllm import loop
from rlhfless.records import FinishReason, PublishedWeights


class FakeCore:
    """Generates the tokens 0, 1, 2, ... for every request, one per step."""

    kv_capacity_tokens = 4096
    block_tokens = 16

    def __init__(self) -> None:
        self.backends: dict[str, str] = {}
        self.requests: dict[str, SampleRequest] = {}
        self.drawn: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def submit(self, request: SampleRequest) -> None:
        if request.max_tokens > 1_000_000:
            raise ValueError("too long")
        self.requests[request.request_id] = request
        self.drawn[request.request_id] = 0

    def step(self) -> list[Sampled]:
        time.sleep(0.001)
        for name in self.drawn:
            self.drawn[name] += 1
        ended = [name for name, request in self.requests.items() if self.drawn[name] >= request.max_tokens]
        return [self._take(name, FinishReason.LENGTH) for name in ended]

    def abort(self, request_ids: tuple[str, ...] | None) -> list[Sampled]:
        chosen = tuple(self.requests) if request_ids is None else request_ids
        return [self._take(name, FinishReason.ABORT) for name in chosen if name in self.requests]

    def progress(self) -> dict[str, int]:
        return dict(self.drawn)

    def shares(self) -> None:
        """One run has the engine."""

    def load(self, published: PublishedWeights, in_flight: bool) -> LoadReport:
        match published.location:
            case "hang":
                time.sleep(60)
            case "slow":
                time.sleep(1)
            case "die":
                os._exit(3)
            case "fail":
                raise KeyError("no such layer")
        return LoadReport(published.version.digest, published.tensors, 0, published.size_bytes, 0.0)

    def logprobs(self, token_ids: tuple[int, ...], run_id: str = "") -> tuple[float, ...]:
        return tuple(-float(token) for token in token_ids[1:])

    def close(self) -> None:
        pass

    def _take(self, name: str, reason: FinishReason) -> Sampled:
        del self.requests[name]
        count = self.drawn.pop(name)
        return Sampled(name, tuple(range(count)), (-1.0,) * count, reason, (), 0, "")


def _start(_settings: object) -> tuple[FakeCore, dict[str, float]]:
    if "RLHFLESS_TEST_SLOW_START" in os.environ:
        time.sleep(60)
    if "RLHFLESS_TEST_FAILED_START" in os.environ:
        print(
            "(EngineCore pid=7) ERROR 11-25 00:00:01 [core.py:1] torch.OutOfMemoryError: CUDA out of memory", flush=True
        )
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    return FakeCore(), {"import": 0.0}


if __name__ == "__main__":
    loop._start = _start  # type: ignore[assignment]
    loop.main()
