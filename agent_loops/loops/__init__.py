"""Loops in the box. Importing this package registers them."""

from penstock.agent_loops.loops.code_act import CodeActLoop
from penstock.agent_loops.loops.multi_agent import MultiAgentLoop
from penstock.agent_loops.loops.single_turn import SingleTurnLoop
from penstock.agent_loops.loops.stepwise import StepwiseLoop
from penstock.agent_loops.loops.tool_agent import ToolAgentLoop

__all__ = [
    "CodeActLoop",
    "MultiAgentLoop",
    "SingleTurnLoop",
    "StepwiseLoop",
    "ToolAgentLoop",
]
