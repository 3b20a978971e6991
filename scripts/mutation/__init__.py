"""`scripts/mutate`: plants mistakes in product code and reports the share that the tests notice."""
