"""Where a run's roles run other than on one machine: Ray, Slurm, Compose, Kubernetes."""
