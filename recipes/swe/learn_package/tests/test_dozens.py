import unittest

from dozens import dozens


class DozensTest(unittest.TestCase):
    def test_dozens(self):
        assert dozens(2) == 24
