"""Penstock: asynchronous, disaggregated reinforcement learning for agents that use tools."""

__version__ = "0.2.0"
