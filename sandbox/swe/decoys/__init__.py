"""Hidden tests with wrong expectations: a patch that passes those too has not been tested, but has forged its results."""
