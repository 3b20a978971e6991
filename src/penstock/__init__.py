"""Penstock: asynchronous, disaggregated reinforcement learning for agents that use tools."""

__version__ = "0.1.0"
