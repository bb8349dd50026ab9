"""The checks of a load, on numbers by hand."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhfless.functions.learner.controller import StoreHome
from rlhfless.records import Probe, WeightVersion
from rlhfless.weights.address import StoreAddress, StoreNotShared
from rlhfless.weights.check import (
    PROBE_TOLERANCE,
    WeightCheckFailed,
    check_consumed,
    check_probe,
    check_read_back,
    default_tolerance,
    largest_difference,
)

VERSION = WeightVersion("run", 1, 3, "ab" * 16)
PROBE = Probe(token_ids=(5, 6, 7), logprobs=(-1.0, -2.0))


def test_largest_difference() -> None:
    assert largest_difference([1.0, 2.0], [1.5, 1.75]) == 0.5
    assert largest_difference([], []) == 0.0
    assert largest_difference([1.0], [1.0, 2.0]) == float("inf")
    nan = float("nan")
    assert largest_difference([0.0, nan, 0.0], [0.0, 0.0, 0.0]) == float("inf")


def test_consumed() -> None:
    check_consumed(VERSION, 10, VERSION.digest, 10)
    with pytest.raises(WeightCheckFailed, match="9 tensors of 10") as skipped:
        check_consumed(VERSION, 10, "cd" * 16, 9)
    assert skipped.value.check == "consumed"
    with pytest.raises(WeightCheckFailed, match="another version's"):
        check_consumed(VERSION, 10, "cd" * 16, 10)


def test_probe() -> None:
    assert check_probe(VERSION, PROBE, [-1.0, -2.25], tolerance=0.25) == 0.25
    with pytest.raises(WeightCheckFailed, match=r"differ by 0.5 .*tolerance 0.25") as failed:
        check_probe(VERSION, PROBE, [-1.0, -2.5], tolerance=0.25)
    assert failed.value.check == "probe"
    assert failed.value.version == VERSION


def test_the_mean_over_the_probe_is_held_closer_than_the_largest() -> None:
    """A token off by 0.2 nats is within the tolerance of each, 0.25; 12 of 40 are not within the mean's, 0.03125."""
    probe = Probe(token_ids=tuple(range(41)), logprobs=(-1.0,) * 40)
    assert check_probe(VERSION, probe, [-1.2] * 6 + [-1.0] * 34, tolerance=0.25) == pytest.approx(0.2)  # mean 0.03
    with pytest.raises(WeightCheckFailed, match=r"0.06 on average over 40 probe tokens \(tolerance 0.0312\)") as failed:
        check_probe(VERSION, probe, [-1.2] * 12 + [-1.0] * 28, tolerance=0.25)
    assert failed.value.check == "probe"


def test_read_back() -> None:
    check_read_back(VERSION, {"a": (100, 0), "b": (3, 0)})
    check_read_back(VERSION, {})
    with pytest.raises(WeightCheckFailed, match=r"2 of 3 sampled elements of 'b', and elements of 1 other") as failed:
        check_read_back(VERSION, {"a": (100, 7), "b": (3, 2), "c": (5, 0)})
    assert failed.value.check == "read_back"


def test_rounding_grows_with_the_size_of_the_logits() -> None:
    """A learner that gives a token -40 has logits of size 40, four times those that the tolerance was measured with."""
    large = Probe(token_ids=(5, 6, 7), logprobs=(-1.0, -40.0))
    assert check_probe(VERSION, large, [-1.0, -41.0], tolerance=0.25) == 1.0
    with pytest.raises(WeightCheckFailed, match=r"differ by 1.5 .*tolerance 1\)"):
        check_probe(VERSION, large, [-1.0, -41.5], tolerance=0.25)
    small = Probe(token_ids=(5, 6, 7), logprobs=(-0.1, -0.2))
    with pytest.raises(WeightCheckFailed, match=r"tolerance 0.25\)"):
        check_probe(VERSION, small, [-0.1, -0.5], tolerance=0.25)


def test_a_probe_that_is_not_a_number_fails() -> None:
    with pytest.raises(WeightCheckFailed):
        check_probe(VERSION, PROBE, [float("nan"), -2.0], tolerance=1e9)


def test_the_failure_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(WeightCheckFailed("probe", VERSION, "why")))
    assert (error.check, error.version, error.message) == ("probe", VERSION, "why")
    assert str(error) == f"weight check `probe` failed for {VERSION.label}: why"


def test_every_dtype_has_a_tolerance() -> None:
    # Ordered by the bits of the mantissa: 23, 10, 7.
    assert PROBE_TOLERANCE["float32"] < PROBE_TOLERANCE["float16"] < PROBE_TOLERANCE["bfloat16"]


def test_the_tolerance_grows_with_depth_and_leaves_a_margin_of_two_at_64_layers() -> None:
    # Largest mean differences of random bfloat16 models, as a share of what 4 layers are allowed (measured).
    for layers, share in ((4, 0.25), (28, 0.50), (64, 0.61)):
        assert share * PROBE_TOLERANCE["bfloat16"] < default_tolerance("bfloat16", layers, "off") / 2
    assert (
        default_tolerance("float32", None, "off")
        == default_tolerance("float32", 2, "off")
        == PROBE_TOLERANCE["float32"]
    )


def test_a_probe_that_fails_says_what_it_saw() -> None:
    with pytest.raises(WeightCheckFailed, match=r"learner's and engine's logprobs: -2 and -2.5 of token 3"):
        check_probe(VERSION, Probe((1, 2, 3), (-1.0, -2.0)), [-1.0, -2.5], tolerance=0.25)


@pytest.mark.parametrize("layers", [28, 64])
def test_a_deep_bfloat16_model_passes_the_probe_with_a_margin(layers: int) -> None:
    """Rounding alone, of a model of random weights: the same model in bfloat16 and in float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().bfloat16()
    tokens = tuple(range(5, 69))

    def logprobs() -> tuple[float, ...]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())

    engine = logprobs()
    model.float()
    check_probe(VERSION, Probe(tokens, logprobs()), engine, default_tolerance("bfloat16", layers, "off") / 2)


def test_a_folder_that_the_learner_does_not_write_to_is_named_with_its_node(tmp_path: Path) -> None:
    address = StoreAddress("file", str(tmp_path / "store"))
    with pytest.raises(StoreNotShared, match=r"transport is file, but '.*store' on node .* Set weights\.transport"):
        address.require_shared()
    StoreHome(address.folder).open("127.0.0.1")
    address.require_shared()
    StoreAddress("http", str(tmp_path / "cache"), "token").require_shared()  # each node has its own
