"""Shared parts of engines behind an HTTP server: the process, the event stream, the weights."""
