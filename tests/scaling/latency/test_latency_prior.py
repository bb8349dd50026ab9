"""What an engine is taken to do before anything was measured."""

from __future__ import annotations

import pytest

from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.fitted import LatencyFit
from rlhfless.scaling.latency.prior import prior_of
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape

# 2 x 1 layers x 8 x 4 x (2 + 2) = 256 of attention, 384 of the MLP, 8 x 10 = 80 of the head: 720 active.
SHAPE = ModelShape(
    layers=1,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    vocabulary=10,
    dense_mlp=384,
    expert_mlp=0,
    experts=0,
    experts_per_token=0,
    tied=True,
    weight_bytes=4,
)


def test_an_accelerator_has_its_data_sheet_and_one_without_the_slowest() -> None:
    devices = load_devices()
    assert prior_of("h100", SHAPE, 2) == Roofline(SHAPE, devices["h100"], 2)
    assert prior_of("a kind of one's own", SHAPE) == Roofline(SHAPE, devices["l40s"])
    accelerators = [device for device in devices.values() if device.kind != "cpu-core"]
    assert min(accelerators, key=lambda device: device.memory_bytes_per_s.value).kind == "l40s"


def test_on_a_core_the_engines_own_work_comes_on_top() -> None:
    core, sheet = prior_of("cpu-core", SHAPE), Roofline(SHAPE, load_devices()["cpu-core"])
    # 9 ms and 0.18 ms a sequence; the model itself takes microseconds.
    assert core.iteration_s(1) == pytest.approx(0.00918 + sheet.iteration_s(1))
    assert core.iteration_s(128) == pytest.approx(0.009 + 128 * 1.8e-4 + sheet.iteration_s(128))
    assert core.prefill_s(2048) == pytest.approx(sheet.prefill_s(2048))


@pytest.mark.parametrize("kind", ["cpu-core", "h100"])
def test_of_a_model_of_unknown_shape_more_sequences_still_take_longer(kind: str) -> None:
    prior = prior_of(kind, None)
    assert prior.iteration_s(1) < prior.iteration_s(200) < 200 * prior.iteration_s(1)


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_a_fit_begins_with_it(shape: ModelShape | None) -> None:
    prior = prior_of("cpu-core", shape)
    model = LatencyFit(prior).model()
    assert model.iteration_s(64) == pytest.approx(prior.iteration_s(64))
    assert model.prefill_s(100) == pytest.approx(prior.prefill_s(100), rel=0.05)
