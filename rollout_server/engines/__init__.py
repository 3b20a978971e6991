"""Engines that sample tokens: each implements `rollout_server.protocol.Engine`."""
