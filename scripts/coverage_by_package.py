"""Coverage of lines and branches, by package, from coverage.py's JSON report.

python scripts/coverage_by_package.py build/coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def main() -> None:
    files = json.loads(Path(sys.argv[1]).read_text())["files"]
    packages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, report in files.items():
        counts = {name: report["summary"][name] for name in COUNTS}
        for package in (_package(Path(path)), "all"):
            packages[package].update(counts)
    print(f"{'package':32} {'lines':>7} {'covered':>8} {'branches':>9} {'covered':>8}")
    for package in sorted(packages, key=lambda name: (name == "all", name)):
        covered_lines, lines, covered_branches, branches = (packages[package][name] for name in COUNTS)
        shares = (f"{100 * part / whole if whole else 100:.1f} %" for part, whole in
                  ((covered_lines, lines), (covered_branches, branches)))  # fmt: skip
        lines_share, branches_share = shares
        print(f"{package:32} {lines:7} {lines_share:>8} {branches:9} {branches_share:>8}")


def _package(path: Path) -> str:
    """The package below the top one, such as rlhfless/orchestrator; the top one of its own modules."""
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


if __name__ == "__main__":
    main()
