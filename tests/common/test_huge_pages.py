from __future__ import annotations

import numpy as np

from penstock.common import huge_area, is_viewed


def test_an_area_knows_whether_a_view_of_it_is_left() -> None:
    area = huge_area(1 << 20)
    assert not is_viewed(area)
    view = memoryview(area)[10:20]
    array = np.frombuffer(view, np.uint8)
    del view
    assert is_viewed(area)
    array[:] = 7
    del array
    assert not is_viewed(area)
    assert area[9:21] == b"\0" + b"\7" * 10 + b"\0"


def test_an_area_has_at_least_one_byte() -> None:
    assert len(huge_area(0)) == 1
