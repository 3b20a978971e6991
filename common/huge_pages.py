"""Large buffers in huge pages, where the kernel has them: creating 4 kB pages costs more than filling them."""

from __future__ import annotations

import contextlib
import mmap

AREA_BYTES = 8 << 20
KEPT_AREAS = 32
"""Empty areas that an arena keeps at most."""
_ALIGNMENT = 64
"""Bytes of a cache line."""


def huge_area(nbytes: int) -> mmap.mmap:
    """Private, zeroed memory of `nbytes` bytes, at least one. It is freed with its last view.

    Raises `OSError` if there is not enough memory.
    """
    area = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


class HugePageArena:
    """Allocates buffers one after the other from areas of `AREA_BYTES`.

    An area is reused once no buffer of it is left: creating its pages again would cost as much as filling them. A
    buffer keeps its whole area alive. Not thread-safe.
    """

    def __init__(self) -> None:
        self._areas: list[mmap.mmap] = []
        self._free = memoryview(b"")
        """What is left of the newest area."""

    def allocate(self, nbytes: int) -> memoryview:
        """[nbytes] uint8, writable, not zeroed. Raises `OSError` as `huge_area`."""
        if nbytes > AREA_BYTES // 2:  # most of an area would stay unused behind it
            return memoryview(huge_area(nbytes))
        if nbytes > len(self._free):
            self._free = memoryview(b"")
            area = self._reuse() or huge_area(AREA_BYTES)
            self._areas.append(area)
            self._free = memoryview(area)
        buffer, self._free = self._free[:nbytes], self._free[nbytes + -nbytes % _ALIGNMENT :]
        return buffer

    def _reuse(self) -> mmap.mmap | None:
        """An empty area, removed from the list; of the other empty ones all but `KEPT_AREAS` are freed."""
        used: list[mmap.mmap] = []
        empty: list[mmap.mmap] = []
        for area in self._areas:
            (used if _has_views(area) else empty).append(area)
        found = empty.pop() if empty else None
        self._areas = [*empty[:KEPT_AREAS], *used]
        return found


def _has_views(area: mmap.mmap) -> bool:
    """Whether a memoryview or an array still refers to it."""
    try:
        area.resize(len(area))  # changes nothing; raises while the buffer is exported
    except BufferError:
        return True
    return False
