"""Agent loops: how an episode is run, token in and token out."""
