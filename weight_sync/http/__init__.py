"""Version files over HTTP: the trainer and servers serve, servers fetch."""
