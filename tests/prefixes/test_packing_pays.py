"""Where packing pays, by expected and by measured rates."""

import pytest

from rlhfless.prefixes.packing import PAYS_BELOW, PAYS_BELOW_ON_GPUS, expected_to_pay_below, packs_below


@pytest.mark.parametrize(
    ("expected", "padded_token_s", "packed_token_s", "below"),
    [
        (0.7, 3e-6, 4e-6, 0.7),  # breaks even at 0.75: as expected
        (0.7, 3e-6, 5.1e-6, 0.7),  # at 0.588, within a factor of 1.2
        (0.7, 3e-6, 5.2e-6, 0.5),  # at 0.577: far from it
        (0.7, 3e-6, 3e-6, 1.0),  # a packed token costs no more than a padded one
        (1.0, 3e-6, 3.5e-6, 1.0),
        (1.0, 3e-6, 4e-6, 0.7),
        (1.0, 3e-6, 7e-6, 0.4),  # at 0.43
        (1.0, 6e-6, 3e-6, 1.0),  # never where it computes more
        (1.0, 1e-6, 1e-4, 0.0),  # it pays nowhere
    ],
)
def test_measured_rates_count_where_they_are_far_from_expected(expected, padded_token_s, packed_token_s, below):
    assert packs_below(expected, padded_token_s, packed_token_s) == below


def test_what_is_expected():
    assert (expected_to_pay_below(on_cpu=False), expected_to_pay_below(on_cpu=True)) == (PAYS_BELOW_ON_GPUS, PAYS_BELOW)
