"""Whether the rows can be read, every one of them, and their prompts leave room for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.datasets import PREFIX, BadSpec, check_spec
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, skipped
from penstock.deploy.preflight.sources import first_rows
from penstock.deploy.preflight.tools import opened_tools

ROWS = 512
"""Whose prompts are rendered."""


def check_data(config: RunConfig) -> Check:
    """Every row of every file; what is wrong is named by file, row and column."""
    from penstock.trainer import DataError, load_rows

    counts = []
    for spec in (config.data.train, config.data.eval):
        if spec is None:
            continue
        try:
            if spec.startswith(PREFIX):
                check_spec(spec)
            else:
                counts.append(f"{len(load_rows(spec))} rows in {spec}")
        except (DataError, BadSpec) as error:
            return Check("data", False, spec, str(error))
    return Check("data", True, "; ".join(counts) or "generated for the run")


def check_prompts(config: RunConfig) -> Check | None:
    """Prompts as the workers will render them, tools included, against what is left of the context for them."""
    from penstock.agent_loops import AgentError
    from penstock.trainer import DataError

    if not Path(config.model).is_dir():
        return skipped("prompts", f"{config.model} is not here yet: nothing to render them with")
    try:
        rows = first_rows(config, ROWS)
        lengths = _lengths(config, [row.messages for row in rows])
    except (AgentError, DataError, BadSpec, ValueError, OSError):
        return None  # `check_data` or `check_template` says so
    room = config.rollout.max_model_len - config.agent.max_response_tokens
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return Check(
        "prompts",
        lengths[longest] <= room,
        f"the longest of {len(lengths)}, row {longest + 1}, has {lengths[longest]} tokens; {room} fit beside an answer",
        f"set rollout.max_model_len to {lengths[longest] + config.agent.max_response_tokens} or more, lower"
        " agent.max_response_tokens, or leave long rows out of the data",
    )


def _lengths(config: RunConfig, prompts: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    from penstock.agent_loops import chat_of, new_budget

    chat = chat_of(config.model, config.agent)
    with opened_tools(config) as tools:
        schemas = [tool.schema for tool in tools.values()]
        fresh = (chat.for_episode(new_budget(config.agent)) for _ in prompts)
        return [one.start(messages, schemas).context_len for one, messages in zip(fresh, prompts, strict=True)]
