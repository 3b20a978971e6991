"""Memory in large pages where the kernel has them: making small ones costs more than the bytes that come into them."""

from __future__ import annotations

import contextlib
import mmap
import platform
import re

SPLITS_WHAT_A_FORK_SHARES = (5, 8)
"""Since this kernel a write into a huge page that a forked child shares copies 4 kB of it; before, all of it."""


def huge_area(nbytes: int) -> mmap.mmap:
    """Private memory of at least one byte; it lives as long as a view of it. Raises `OSError` where there is none."""
    area = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def is_viewed(area: mmap.mmap) -> bool:
    """Whether a memoryview of it is left, or an array of one."""
    try:
        area.resize(len(area))  # what nobody may do while there is one
    except BufferError:
        return True
    return False


def forks_cheaply() -> bool:
    """Whether a process that forks may have its memory in huge pages."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= SPLITS_WHAT_A_FORK_SHARES
