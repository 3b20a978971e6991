from __future__ import annotations

import pytest

from penstock.common import huge_area


@pytest.mark.parametrize(("nbytes", "size"), [(0, 1), (1, 1), (3 << 20, 3 << 20)])
def test_huge_area_is_zeroed_and_has_at_least_one_byte(nbytes: int, size: int) -> None:
    area = huge_area(nbytes)
    assert (len(area), area[:]) == (size, bytes(size))
    area[-1:] = b"x"
    assert area[-1:] == b"x"
