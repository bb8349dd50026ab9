"""The benchmarks' own modules can be imported, as they import each other; and the traces of known runs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
