from __future__ import annotations

import numpy as np

from penstock.common import HugePageArena, huge_area

MB = 1 << 20


def mapped(pattern: int) -> int:
    """Megabytes of this process's memory in mappings of whole areas (8 MB), which hold `pattern` at their start."""
    found = 0
    with open("/proc/self/maps", encoding="ascii") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if (last - first) % (8 * MB) == 0 and " rw-p " in line:
                for start in range(first, last, 8 * MB):
                    memory.seek(start)
                    found += 8 if memory.read(1)[0] == pattern else 0
    return found


def filled(arena: HugePageArena, nbytes: int, value: int) -> np.ndarray:
    array = np.frombuffer(arena.allocate(nbytes), np.uint8)
    array[:] = value
    return array


def test_buffers_do_not_overlap() -> None:
    arena = HugePageArena()
    sizes = [1, 63, 64, 65, 3 * MB, 3 * MB, 3 * MB, 5 * MB, 100, 0]
    arrays = [filled(arena, nbytes, number) for number, nbytes in enumerate(sizes)]
    for number, (array, nbytes) in enumerate(zip(arrays, sizes, strict=True)):
        assert array.shape == (nbytes,)
        assert (array == number).all()


def test_an_area_is_reused_only_when_its_last_buffer_is_gone() -> None:
    arena = HugePageArena()
    kept = filled(arena, 2 * MB, 111)[MB : MB + 10]  # a part of a buffer keeps the area
    for value in range(20):
        filled(arena, 3 * MB, value)
    assert (kept == 111).all()


def test_an_arena_that_is_emptied_again_and_again_does_not_grow() -> None:
    arena = HugePageArena()
    for _ in range(30):
        arrays = [filled(arena, 4 * MB, 222) for _ in range(8)]  # two in each of four areas
        assert 4 * 8 <= mapped(222) <= 5 * 8
        del arrays


def test_an_area_has_at_least_one_byte() -> None:
    assert len(huge_area(0)) == 1
