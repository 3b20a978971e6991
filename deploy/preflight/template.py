"""Whether the chat template takes the run's tools and can be spliced token for token."""

from __future__ import annotations

from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.tools import opened_tools


def check_template(config: RunConfig) -> Check | None:
    if not Path(config.model).is_dir():
        return None
    from penstock.agent_loops import AgentError, chat_of
    from penstock.sandbox import SandboxError

    try:
        with opened_tools(config) as tools:
            proof = chat_of(config.model, config.agent).prove([tool.schema for tool in tools.values()])
    except (AgentError, SandboxError, OSError, ValueError) as error:
        return Check("chat template", False, config.model, str(error))
    return Check("chat template", True, f"splices exactly, proven on {proof.conversations} conversations")
