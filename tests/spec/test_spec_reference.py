"""The reference page says what the code says."""

import subprocess
import sys


def test_the_table_of_all_keys_is_up_to_date(request):
    script = request.config.rootpath / "scripts" / "spec_reference.py"
    result = subprocess.run([sys.executable, script, "--check"], timeout=120, check=False)
    assert result.returncode == 0, "run scripts/spec_reference.py"
