"""`python -m rlhfless.control.driver RUN_FOLDER`: the process of one attempt of one run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlhfless.control.driver.main import drive
from rlhfless.control.process_limits import limit_driver
from rlhfless.util.folders import OTHERS

if __name__ == "__main__":
    os.umask(OTHERS)
    sys.exit(drive(Path(sys.argv[1]), limit_driver))
