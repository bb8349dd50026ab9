"""The reference page says what the code says."""

import subprocess
import sys


def test_the_table_of_all_keys_is_up_to_date(request):
    script = request.config.rootpath / "scripts" / "spec_reference.py"
    result = subprocess.run([sys.executable, script, "--check"], timeout=120, check=False)
    assert result.returncode == 0, "run scripts/spec_reference.py"


def test_every_key_of_a_scenario_has_a_row_with_its_meaning(request):
    """No key but `type` is without a word."""
    page = (request.config.rootpath / "docs" / "scenario.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    bare = sorted({row[0].strip("| `") for row in rows if not row[-1].strip(" |")})
    assert bare in ([], ["type"])
    assert {"cluster", "policies", "heartbeat_s"} <= {row[0].strip("| `") for row in rows}
    policies = next(row for row in rows if row[0] == "| `policies`")
    assert "required" not in policies[2], "all by default"
    assert "](scenario.md)" in (request.config.rootpath / "docs" / "simulate.md").read_text("utf-8")
