import unittest

from share import share


class ShareTest(unittest.TestCase):
    def test_share(self):
        assert share(7, 2) == 3
