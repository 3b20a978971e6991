import unittest

from cost import cost


class CostTest(unittest.TestCase):
    def test_cost(self):
        assert cost(7, 2) == 14
