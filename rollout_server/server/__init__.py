"""The process of a rollout server: its HTTP routes, its request queue, and the sidecar that owns the engine."""
