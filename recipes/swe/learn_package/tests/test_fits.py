import unittest

from fits import fits


class FitsTest(unittest.TestCase):
    def test_fits(self):
        assert fits(2, 3)
        assert fits(3, 3)
        assert not fits(4, 3)
