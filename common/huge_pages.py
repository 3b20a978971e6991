"""Large buffers in huge pages, where the kernel has them: creating 4 kB pages costs more than filling them."""

from __future__ import annotations

import contextlib
import mmap


def huge_area(nbytes: int) -> mmap.mmap:
    """Private, zeroed memory of `nbytes` bytes, at least one. It is freed with its last view.

    Raises `OSError` if there is not enough memory.
    """
    area = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return area
