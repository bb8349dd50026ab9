"""What holds for all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from rlhfless.text import storable

# Timings never decide a test; and what is compiled is compiled in the first example that calls it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Tests of arbitrary text print and log any; what pytest-xdist sends from its workers must be valid Unicode."""
    report = yield
    report.sections = [(name, storable(text)) for name, text in report.sections]
    return report
