"""A run's roles as actors of a Ray cluster: `penstock run RECIPE --on ray`."""
