"""The page of a run: its pipeline, curves, trajectories and dead letters, in a browser."""
