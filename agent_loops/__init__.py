"""Agent loops: how an episode is run, token in and token out."""

from penstock.agent_loops.base import AgentLoopBase, AgentLoopOutput
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.registry import register

__all__ = ["AgentLoopBase", "AgentLoopOutput", "Conversation", "register"]
