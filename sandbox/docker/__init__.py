"""Boxes made by a Docker engine: one container per session."""
