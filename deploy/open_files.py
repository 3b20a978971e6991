"""How many files and sockets a process of ours may have open."""

from __future__ import annotations

import contextlib
import resource

MOST = 65536
"""Far above what a role needs; a hard limit may be a billion, which makes programs that close all files slow."""


def raise_open_files() -> None:
    """Up to the hard limit: a worker's episodes have sockets and boxes, and the soft limit is for programs with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # what there is stays; the doctor says where it is too little
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
