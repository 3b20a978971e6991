"""Engines: one room each, and what they share."""
