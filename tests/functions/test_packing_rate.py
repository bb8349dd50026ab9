"""Where packing pays is measured on GPUs when a model has been loaded; here with times that are given."""

import dataclasses

import pytest

from fakes.ranks import run_learner as run
from rlhfless.functions import packing_rate
from rlhfless.functions.packing_rate import measured, with_measured_rates
from rlhfless.functions.policy import load_policy
from rlhfless.prefixes.packing import PAYS_BELOW, PAYS_BELOW_ON_GPUS
from rlhfless.spec import ModelSpec

GROUP_TOKENS = 8 * 64  # the tiny model has 64 positions


@pytest.fixture(scope="module")
def policy(tiny_model):
    loaded = load_policy(ModelSpec(path=tiny_model), parameter_dtype="float32", compute_dtype="float32")
    return dataclasses.replace(loaded, packs_below=PAYS_BELOW_ON_GPUS)


def timed(monkeypatch, seconds):
    """Have passes take these times; the passes are real, and are returned."""
    passed, given = [], iter(seconds)

    def time_s(policy, forward):
        passed.append(tuple(forward().shape[:2]))
        return next(given)

    monkeypatch.setattr(packing_rate, "_time_s", time_s)
    return passed


def test_it_follows_from_the_least_times_of_both_passes(policy, monkeypatch):
    """A padded pass of one group has 512 tokens, its row 32 + 8 x 32 = 288. With 0.512 and 0.576 s a packed token takes
    2 ms, twice as long as a padded one: packing pays below half of the tokens."""
    passed = timed(monkeypatch, [9, 9, 0.6, 0.7, 0.512, 0.65, 0.53, 0.576])
    assert measured(policy, GROUP_TOKENS).packs_below == 0.5
    assert passed == 4 * [(8, 64), (1, 288)]


def test_groups_fill_a_micro_batch(policy, monkeypatch):
    passed = timed(monkeypatch, 8 * [1.0])
    assert measured(policy, 3 * GROUP_TOKENS + 5).packs_below == 0.5  # 1,536 tokens beside 864: breaks even at 0.56
    assert passed[:2] == [(24, 64), (1, 3 * 288)]


def test_times_within_what_is_expected_change_nothing(policy, monkeypatch):
    timed(monkeypatch, 4 * [1.0, 0.65])  # a packed token takes 1.16 times as long
    assert measured(policy, GROUP_TOKENS).packs_below == PAYS_BELOW_ON_GPUS


def test_nothing_is_measured_where_it_decides_nothing(policy, monkeypatch):
    passed = timed(monkeypatch, [])
    assert measured(policy, GROUP_TOKENS - 1) is policy
    alone = dataclasses.replace(policy, packs_below=0.0)
    assert measured(alone, GROUP_TOKENS) is alone
    on_cpu = dataclasses.replace(policy, packs_below=PAYS_BELOW)
    assert with_measured_rates(on_cpu, GROUP_TOKENS) is on_cpu
    assert not passed


def test_with_real_times(policy):
    assert 0 <= measured(policy, GROUP_TOKENS).packs_below <= 1


def below(learner, rank):
    """Of a rank whose packed passes take long on the second rank alone."""
    packing_rate._time_s = lambda policy, forward: 1.0 if forward().shape[0] > 1 else 1.0 + 2 * rank
    return measured(dataclasses.replace(learner._policy, packs_below=1.0), GROUP_TOKENS).packs_below


def test_ranks_agree(tiny_model, tmp_path):
    """Padded 1 and 1 s, packed 1 and 3 s: 2 / 512 by 4 / 288 is 0.28."""
    assert run(below, tiny_model, tmp_path, 2) == [0.2, 0.2]
