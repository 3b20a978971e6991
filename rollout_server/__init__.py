"""Rollout servers: engines that sample tokens, the sidecars that own them, the weights they pull, routing."""
