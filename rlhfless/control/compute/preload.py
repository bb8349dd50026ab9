"""The imports of the process from which the service forks its jobs: a job starts with all of them in memory.

In a new interpreter, a job took over a second to refuse a question that it answers in milliseconds.
"""

import os

NICE = 10
"""Niceness of jobs, so that runs come first."""

os.nice(NICE)
# Jobs leave the other cores to runs, and each thread of these libraries would count towards a job's memory. Arrow's
# other allocator has its own thread, and a process that forks should have only one thread.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", ARROW_DEFAULT_MEMORY_POOL="system")

from rlhfless.control.compute.jobs import JOBS  # noqa: E402

__all__ = ["JOBS"]
