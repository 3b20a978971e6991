import unittest

from change import change
from cheaper import cheaper
from cost import cost
from dozens import dozens
from enough import enough
from fits import fits
from share import share
from total import total


class PackageTest(unittest.TestCase):
    def test_change(self):
        assert [change(9, 3), change(20, 4), change(5, 5)] == [6, 16, 0]

    def test_cheaper(self):
        assert [cheaper(1, 8), cheaper(8, 8), cheaper(9, 8)] == [True, False, False]

    def test_cost(self):
        assert [cost(9, 3), cost(20, 4), cost(5, 1)] == [27, 80, 5]

    def test_dozens(self):
        assert [dozens(0), dozens(1), dozens(5)] == [0, 12, 60]

    def test_enough(self):
        assert [enough(9, 8), enough(8, 8), enough(1, 8)] == [True, True, False]

    def test_fits(self):
        assert [fits(1, 8), fits(8, 8), fits(9, 8)] == [True, True, False]

    def test_share(self):
        assert [share(9, 3), share(21, 4), share(5, 5)] == [3, 5, 1]

    def test_total(self):
        assert [total(9, 3), total(20, 4), total(5, 1)] == [12, 24, 6]
