import unittest

from cheaper import cheaper


class CheaperTest(unittest.TestCase):
    def test_cheaper(self):
        assert cheaper(2, 3)
        assert not cheaper(3, 3)
        assert not cheaper(4, 3)
