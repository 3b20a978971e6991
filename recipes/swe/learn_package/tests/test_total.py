import unittest

from total import total


class TotalTest(unittest.TestCase):
    def test_total(self):
        assert total(7, 2) == 9
