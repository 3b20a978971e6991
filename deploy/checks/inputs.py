"""Whether the model, its chat template, the rewards and the data are there and can be used."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.deploy.checks.boxes import open_sandbox
from penstock.deploy.checks.check import Check
from penstock.deploy.checks.sources import data_sources
from penstock.deploy.config import RunConfig
from penstock.deploy.data.generate import PREFIX


def check_model(config: RunConfig) -> Check:
    folder = Path(config.model)
    if not folder.is_dir():
        hub_name = config.model.count("/") == 1 and not config.model.startswith((".", "/"))
        mend = "give a folder with config.json, tokenizer and *.safetensors, or a hub name such as Qwen/Qwen3-0.6B"
        return Check(
            "model", hub_name, f"{config.model} (no such folder{'; taken as a hub name' if hub_name else ''})", mend
        )
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    return Check("model", not missing, f"{folder}{' lacks ' + ', '.join(missing) if missing else ''}",
                 "save the model and its tokenizer with save_pretrained into this folder")  # fmt: skip


def check_reward(config: RunConfig) -> Check | None:
    """Rewards in the box and their settings, and under by_data_source whether every row has one."""
    from penstock.agent_loops.errors import LoadError
    from penstock.agent_loops.reward import BY_SOURCE, check_reward
    from penstock.agent_loops.rewards.names import REWARDS

    if config.agent.reward not in (*REWARDS, BY_SOURCE):
        return None  # a function of the user's: loaded by the workers alone
    try:
        check_reward(config.agent, data_sources(config))
    except LoadError as error:
        return Check("agent.reward", False, config.agent.reward, str(error))
    return Check("agent.reward", True, config.agent.reward)


def check_data(config: RunConfig) -> Check:
    from penstock.trainer.data import DataError, load_rows

    counts = []
    for spec in (config.data.train, config.data.eval):
        if spec is None or spec.startswith(PREFIX):
            continue
        try:
            counts.append(f"{len(load_rows(spec))} rows in {spec}")
        except DataError as error:
            return Check("data", False, spec, str(error))
    return Check("data", True, "; ".join(counts) or "generated for the run")


def check_template(config: RunConfig) -> Check | None:
    """The chat template takes tools and can be spliced token for token."""
    if not Path(config.model).is_dir():
        return None
    from penstock.agent_loops.chat import TemplateError, chat_of
    from penstock.agent_loops.load import allow_imports_from
    from penstock.sandbox.protocol import Sandbox, SandboxError
    from penstock.tools.registry import make_tools

    sandbox: Sandbox | None = None
    allow_imports_from(Path.cwd())  # as workers do: a recipe's tools may lie there
    try:
        sandbox = open_sandbox(config) if config.tools else None
        schemas = [tool.schema for tool in make_tools(config.tools, sandbox).values()]
        chat_of(config.model, config.agent).prove(schemas)
    except (TemplateError, SandboxError, OSError, ValueError) as error:
        return Check("chat template", False, config.model, str(error))
    finally:
        if sandbox is not None:
            asyncio.run(sandbox.close())
    return Check("chat template", True, "splices exactly")
