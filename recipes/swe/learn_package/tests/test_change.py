import unittest

from change import change


class ChangeTest(unittest.TestCase):
    def test_change(self):
        assert change(7, 2) == 5
