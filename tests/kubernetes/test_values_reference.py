"""The table of values in docs/kubernetes.md is of the chart's values."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_the_table_of_values_is_up_to_date(request: pytest.FixtureRequest) -> None:
    script = request.config.rootpath / "scripts" / "values_reference.py"
    result = subprocess.run([sys.executable, script, "--check"], timeout=60)
    assert result.returncode == 0, "run scripts/values_reference.py"
