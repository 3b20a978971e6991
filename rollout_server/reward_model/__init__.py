"""A sequence classifier as a service: `penstock reward-server`."""
