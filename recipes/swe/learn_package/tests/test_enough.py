import unittest

from enough import enough


class EnoughTest(unittest.TestCase):
    def test_enough(self):
        assert enough(4, 3)
        assert enough(3, 3)
        assert not enough(2, 3)
