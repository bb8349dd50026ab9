"""Commands as a user that is not root, in tests that root runs: nobody, for whom Python can be reached even if it lies
below a folder that only root may enter."""

import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

USER = 65534

# In a mount namespace of its own /root is laid over by one that all may enter. What is changed there goes with it.
_SCRIPT = f"""
set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/root,upperdir=/mnt/upper,workdir=/mnt/work /root
chmod 755 /root
exec setpriv --reuid={USER} --regid={USER} --clear-groups -- "$@"
"""


def as_other_user(*command: str) -> list[str]:
    """The command line; the same where the tests are not run by root."""
    if os.getuid() != 0:
        return list(command)
    if not _possible():
        pytest.skip("root needs unshare, setpriv and CAP_SYS_ADMIN to start something as another user")
    return _wrapped(command)


def _wrapped(command: tuple[str, ...]) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", *command]


@cache
def _possible() -> bool:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    return subprocess.run(_wrapped((sys.executable, "-c", "")), capture_output=True, timeout=60).returncode == 0
