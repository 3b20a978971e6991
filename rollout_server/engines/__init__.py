"""Engines: the processes that sample tokens, each behind the `Engine` protocol."""
