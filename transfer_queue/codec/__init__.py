"""Trajectories, journal entries and tasks as bytes: `trajectories` says what is stored, `packing` and `columns` how."""
