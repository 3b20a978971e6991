"""The queue between rollout and training: tasks, leases, turn journal, trajectories, steps, versions."""
