"""What a cluster would do: a discrete-event model of rollouts, gate and trainer. Imports no torch and no engine."""
