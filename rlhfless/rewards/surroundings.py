"""The environment of a worker of rewards, and its output.

A user's reward needs the locations of Python, libraries and caches, and no secret of the service or the run that starts
it (the database's password, keys of clouds). Its output goes to the log under its name, up to a limit: a reward that
prints its whole batch at every call would fill the disk.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO

from rlhfless.util.text import legible

KIB = 1024

PRINTED_KIB = 256
"""The most output of one worker, in KiB, restarts included: thousands of lines."""

LINE_BYTES = 8 * KIB
"""A longer line is cut in several."""

OWN_PREFIX = "RLHFLESS_REWARD_"
"""Variables that are for rewards."""

_PASSED = re.compile(
    r"(?i:(https?|all|no)_proxy)|PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|(SSL_CERT|REQUESTS_CA|CURL_CA|XDG|PYTHON|OMP|MKL|OPENBLAS|NUMBA|CUDA|NVIDIA|TORCH|TRANSFORMERS|NLTK|TIKTOKEN)"
    r"_?\w*|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_\w+|ENDPOINT)|RLHFLESS_HOME|" + OWN_PREFIX + r"\w+"
)


def environment_of_rewards(own: Mapping[str, str]) -> dict[str, str]:
    """The part of a parent's environment that its worker gets."""
    return {name: value for name, value in own.items() if _PASSED.fullmatch(name)}


class Output:
    """The output of one worker's processes, which follow each other."""

    def __init__(self, reward: Callable[[], str]) -> None:
        """`reward`: the name of the reward that is at work."""
        self._reward = reward
        self._left_bytes = PRINTED_KIB * KIB

    def follow(self, stream: IO[bytes]) -> None:
        """Write the output of a process to standard error, in a thread that ends with the process."""
        threading.Thread(target=self._follow, args=(stream,), name="reward-output", daemon=True).start()

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(LINE_BYTES):
                was_full, self._left_bytes = self._left_bytes <= 0, self._left_bytes - len(line)
                if not was_full:
                    self._say(line.decode("utf-8", "replace").rstrip("\n"))
                    if self._left_bytes <= 0:
                        self._say(f"has printed more than {PRINTED_KIB} KiB; what it prints after this is left out")

    def _say(self, text: str) -> None:
        print(f"[reward {self._reward()}] {legible(text)}", file=sys.stderr, flush=True)
