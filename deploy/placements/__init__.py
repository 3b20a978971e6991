"""Placements of a run's roles on several machines: Ray, Slurm, Compose, Kubernetes."""
