"""Checks of what an episode needs: tools, chat template, agent loop, prompts, rewards, search servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.agent_loops import (
    AgentError,
    AgentLoopBase,
    InfraFailure,
    LoadError,
    TemplateError,
    find_loop,
    load_object,
)
from penstock.common.event_loop import run_users_code
from penstock.datasets import BadSpec, is_generated
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, refused, skipped
from penstock.deploy.preflight.data import data_sources, first_rows
from penstock.deploy.preflight.model import positions_of
from penstock.deploy.preflight.sandbox import open_sandbox, tools_need_boxes
from penstock.sandbox import SandboxError
from penstock.tools import BaseTool, ToolConfig, ToolConfigError, close_tools, make_tools

if TYPE_CHECKING:
    from penstock.sandbox import Sandbox
    from penstock.trainer import DatasetRow


@contextlib.contextmanager
def opened_tools(config: RunConfig) -> Iterator[Mapping[str, BaseTool]]:
    """Users' tools are found from the current directory, as a worker finds them.

    Raises `SandboxError`, `ToolConfigError`, `LoadError`.
    """
    sandbox = open_sandbox(config) if tools_need_boxes(config) else None
    tools: Mapping[str, BaseTool] = {}
    try:
        tools = make_tools(config.tools, sandbox, partial(load_object, recipe_dir=Path.cwd()))
        yield tools
    finally:
        asyncio.run(close_tools(tools.values()))
        if sandbox is not None:
            asyncio.run(sandbox.close())


def check_template(config: RunConfig) -> Check | None:
    """Check that the tools load, and that the model's chat template appends the turns that use them exactly."""
    from penstock.agent_loops import verify_sources
    from penstock.agent_loops.chat import chat_of

    name = "chat template"
    try:
        with opened_tools(config) as tools:
            if not Path(config.model).is_dir():
                return None
            try:
                chat = chat_of(config.model, config.agent)
                verified = verify_sources(chat, config.agent, tools)
            except LoadError:  # of a set of tools that `agent.sources` names
                raise
            except (AgentError, OSError, ValueError) as error:
                return Check(name, False, f"{config.model}: {error}", "correct what it names, or choose another model")
        detail = f"turns are appended exactly; verified on {verified.conversations} conversations"
        if roles := sorted(chat.renewing_roles):
            detail += f"; a new segment begins before messages of role {' and '.join(roles)}"
        return Check(name, True, detail)
    except SandboxError:
        return skipped(name, "it needs the tools, and they a sandbox: see `sandbox`")
    except (ToolConfigError, LoadError) as error:
        of_verl = "No module named 'verl" in str(error) or "as verl's tools do" in str(error)
        own = "derive the class from penstock.tools.BaseTool, with its methods (docs/from/verl.md)"
        return refused("tools", error, own if of_verl else "correct this entry of `tools` in the recipe")


def check_loop(config: RunConfig) -> Check | None:
    """Check that the loops load, that one calls the recipe's tools, and that all fork if they must."""
    if not config.agent.workers:
        return None  # episodes are leased by somebody else
    name, of_rows = "agent.loop", _named_by_rows(config)
    loops = {}
    for loop in dict.fromkeys([*config.agent.loops, *sorted(of_rows)]):
        try:
            loops[loop] = find_loop(loop, Path())
        except LoadError as error:
            if loop in config.agent.loops:
                return refused(name, error, "set agent.loop to a known name, a dotted path or FILE.py:NAME")
            fix = "correct the column; rows without agent_name, or with none, are played by agent.loop"
            return refused(name, LoadError(f"{of_rows[loop]}, column agent_name: {error}"), fix)
    if config.tools and not any(loop.takes_tools for loop in loops.values()):
        tools = ", ".join(tool.name for tool in config.tools)
        fix = "use TASKS (data.train) in place of the environment, or leave out the tools"
        return Check(name, False, f"{', '.join(loops)} takes no tools, and the recipe has {tools}", fix)
    return _unfit_loop(config, loops) or Check(name, True, ", ".join(loops))


def _unfit_loop(config: RunConfig, loops: Mapping[str, type[AgentLoopBase]]) -> Check | None:
    """The check that fails because a loop cannot do what the recipe asks of it; None if all can."""
    try:
        for agent in config.agent.of_sources():
            loops[agent.loop].check_settings(agent.settings)
    except LoadError as error:
        return refused("agent.loop", error, "correct the setting; the page 'Agent loops' lists those of each loop")
    recorded = [loop for loop, kind in loops.items() if not kind.can_fork]
    if recorded and config.agent.forks is not None:
        reason = f"agent.forks: {', '.join(recorded)} keeps more than the journal of its episode and has no branches"
        return Check("agent.loop", False, reason, "leave out agent.forks, or choose another loop")
    return None


def _named_by_rows(config: RunConfig) -> dict[str, str]:
    """The loop in a column agent_name → its first row."""
    from penstock.trainer import DataError, load_rows

    files = [spec for spec in (config.data.train, config.data.eval) if spec and not is_generated(spec)]
    places: dict[str, str] = {}
    try:
        for spec in files:
            for number, row in enumerate(load_rows(spec), start=1):
                if row.agent_name:
                    places.setdefault(row.agent_name, f"{spec}, row {number}")
    except DataError:
        return {}  # `check_data` says so
    return places


NAME = "agent.reward"
ANSWER = "penstock doctor asks whether this can be scored"


def check_reward(config: RunConfig) -> Check | None:
    """Check that the reward loads, a user's function too, and that every row has one under by_data_source."""
    from penstock.agent_loops.rewards import check_reward

    if not config.agent.workers:
        return None  # episodes are leased by somebody else
    if not config.agent.reward:
        # These loops leave the reward to `agent.reward` or to tools, and these tools give none.
        loops = {*config.agent.loops, *_named_by_rows(config)} - {"single_turn", "tool_agent"}
        if loops or {tool.name for tool in config.tools} - NO_REWARD:
            return None  # loops or tools give the rewards
        return Check(NAME, False, "no loop and no tool gives a reward", "set agent.reward=FILE.py:compute_score")
    try:
        check_reward(config.agent, data_sources(config))
    except LoadError as error:
        fix = "set agent.reward to a known name, a dotted path or FILE.py:NAME"
        if " has no parameter " in str(error):
            fix = "correct agent.rewards.settings (of a source: agent.rewards.sources), or add the parameter"
        return refused(NAME, error, fix)
    return Check(NAME, True, config.agent.reward)


NO_REWARD = {"python", "shell", "editor", "final_answer", "search", "web_search"}
"""Tools that give no reward."""
GIVEN = ("", "program_file")
"""Rewards that nothing but an episode has."""


def check_score(config: RunConfig) -> Check | None:
    """The first row of the data is scored, by a reward server or judge for real."""
    from penstock.trainer import DataError

    if config.agent.reward in GIVEN:
        return None  # loops, tools or programs give the rewards
    try:
        row = first_rows(config, 1)[0]
    except (DataError, BadSpec):
        return None  # `check_data` says so
    try:
        with asyncio.Runner() as runner:
            reward = run_users_code(runner, _score(config, row))
    except LoadError as error:
        return Check("reward of a row", False, str(error), "correct agent.reward")
    except InfraFailure as error:
        return Check("reward of a row", False, f"{config.agent.reward} on row 1: {error}", _fix(config, error.reason))
    return Check("reward of a row", True, f"{config.agent.reward} scores row 1: {reward:g} for a wrong answer")


async def _score(config: RunConfig, row: DatasetRow) -> float:
    """Score a row as a worker does. Raises `LoadError`, `InfraFailure`."""
    from penstock.agent_loops.rewards import load_reward

    async with reward_sandbox(config) as sandbox:
        reward = load_reward(config.agent, Path(), sandbox)
        assert reward is not None
        try:
            # A worker passes these facts in addition to the row.
            facts: dict[str, Any] = {
                "num_turns": 1,
                "tool_calls": 0,
                "final_answer": None,
                "tool_rewards": {},
                "final_text": ANSWER,
                "segments": [ANSWER],
            }
            return (await reward.score(row.task("doctor/0", "train"), ANSWER, facts)).reward
        finally:
            await reward.close()


@contextlib.asynccontextmanager
async def reward_sandbox(config: RunConfig) -> AsyncIterator[Sandbox | None]:
    """The run's, where its rewards may need one and one can be made; `check_sandbox` says if it cannot."""
    from penstock.agent_loops.rewards import may_need_sandbox

    sandbox: Sandbox | None = None
    if may_need_sandbox(config.agent):
        with contextlib.suppress(SandboxError):
            sandbox = open_sandbox(config)
    try:
        yield sandbox
    finally:
        if sandbox is not None:
            await sandbox.close()


def _fix(config: RunConfig, reason: str) -> str:
    if "ConnectError" in reason or "ConnectTimeout" in reason:
        return "start the service that agent.rewards names, or correct its url"
    if "HTTP 401" in reason or "HTTP 403" in reason:
        return "the service refuses the token: set the environment variable of its key as the service has it"
    return f"make {config.agent.reward} return a finite number for this row"


QUESTION = {"query": "penstock doctor"}


def check_search(config: RunConfig) -> list[Check]:
    """Search servers of the recipe. A web search is paid for by the question and is not asked."""
    tools = [entry for entry in config.tools if entry.name == "search" or entry.name.endswith(":SearchTool")]
    return [check for entry in tools if (check := asyncio.run(_ask(entry))) is not None]


async def _ask(entry: ToolConfig) -> Check | None:
    from penstock.tools import TOKEN_VARIABLE, ToolInfraError

    try:
        (tool,) = make_tools([entry], None, partial(load_object, recipe_dir=Path.cwd())).values()
    except (ToolConfigError, LoadError):
        return None  # `check_template` says so
    try:
        await tool.execute(None, QUESTION)
    except ToolInfraError as error:
        fix = "start it (`penstock search-server`), let this machine reach it, or correct url in the tool's settings"
        if "HTTP 401" in error.reason or "HTTP 403" in error.reason:
            fix = f"set {TOKEN_VARIABLE} to the token that the search server was started with"
        return Check("search server", False, error.reason, fix)
    finally:
        await tool.close()
    return Check("search server", True, f"{entry.settings.get('url', 'its usual address')} answers")


def check_lengths(config: RunConfig) -> Check:
    name = "rollout.max_model_len"
    try:
        longest = _longest_response(config)
    except LoadError as error:
        return Check(name, False, str(error), "correct agent.settings")
    positions, room = config.rollout.max_model_len, _positions(config)
    if longest < room:
        return Check(name, True, f"{positions}, responses up to {longest}: {positions - longest} left for prompts")
    bound = _bound(config, longest)
    is_loops = bound == LOOP
    answer = f"an answer of up to {longest} tokens ({bound})" if is_loops else f"an answer of {bound} {longest}"
    limit = f"{name} {positions}" if room == positions else f"the model's {room} positions"
    problem = f"{answer} alone is {'longer than' if longest > room else 'as long as'} {limit}: no prompt fits"
    fix = f"lower the lengths in {bound}" if is_loops else f"lower {bound} below {room}"
    most = positions_of(config)
    if most is None or most > longest:
        fix += f", or raise {name} above {longest}" + " if the model has more positions" * (most is None)
    return Check(name, False, problem, fix)


def _positions(config: RunConfig) -> int:
    """Positions of a prompt and its answer; the model's, where `check_context` refuses to have more."""
    most = positions_of(config)
    return config.rollout.max_model_len if most is None else min(config.rollout.max_model_len, most)


def _longest_response(config: RunConfig) -> int:
    """Returns the longest response of any data source, in tokens. Raises `LoadError` if a loop refuses its settings."""
    lengths = []
    for agent in config.agent.of_sources():
        try:
            loop = find_loop(agent.loop, Path())
        except LoadError:
            lengths.append(agent.max_response_tokens)  # `check_loop` reports it
        else:
            lengths.append(loop.longest_response(agent))
    return max(lengths)


LOOP = "agent.settings"
"""Bounds the answers of a loop that has lengths of its own."""


def _bound(config: RunConfig, longest: int) -> str:
    """Name the setting that allows responses of this length."""
    if longest == config.agent.max_response_tokens:
        return "agent.max_response_tokens"
    sources = (name for name, own in config.agent.sources.items() if own.max_response_tokens == longest)
    return next((f"agent.sources.{name}.max_response_tokens" for name in sources), LOOP)


def check_prompts(config: RunConfig) -> Check | None:
    """Prompts as the workers will render them, tools included, against what is left of the context for them."""
    from penstock.trainer import BadMessages, DataError

    if not Path(config.model).is_dir():
        return skipped("prompts", f"{config.model} is not here yet: nothing to render them with")
    if config.agent.loops == ["command"]:
        return skipped("prompts", "the program of agent.loop=command sends its own prompts: their length is not known")
    try:
        response = _longest_response(config)
        if response >= _positions(config):
            return skipped("prompts", "answers leave them no room: see rollout.max_model_len")
        rows = first_rows(config, 512)
        lengths = _lengths(config, [row.messages for row in rows])
    except BadMessages as error:
        return Check("prompts", False, str(error), "correct the row, or choose a model whose template takes it")
    except (AgentError, DataError, BadSpec, SandboxError, ValueError, OSError):
        return None  # `check_data`, `check_template`, `check_lengths` or `check_sandbox` says so
    room = config.rollout.max_model_len - response
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return Check(
        "prompts",
        lengths[longest] <= room,
        f"of {len(lengths)} rows checked, row {longest + 1} is the longest: {lengths[longest]} tokens;"
        f" {room} fit next to an answer",
        f"set rollout.max_model_len to {lengths[longest] + response} or more, lower {_bound(config, response)},"
        " or leave long rows out of the data",
    )


def _lengths(config: RunConfig, prompts: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """Raises `BadMessages` that names the row, if the chat template takes prompts and refuses that of the row."""
    from penstock.agent_loops.chat import chat_of, new_budget
    from penstock.trainer import BadMessages

    chat = chat_of(config.model, config.agent)
    lengths = []
    with opened_tools(config) as tools:
        schemas = [tool.schema for tool in tools.values()]
        chat.start([{"role": "user", "content": ANSWER}], schemas)
        for row, messages in enumerate(prompts, start=1):
            try:
                fresh = chat.for_episode(new_budget(config.agent))
                lengths.append(fresh.start(messages, schemas).context_len)
            except (TemplateError, RecursionError) as error:
                raise BadMessages(f"{config.data.train}, row {row}: {error}") from error
    return lengths
