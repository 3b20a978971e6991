"""The calculator's task, done by agents of the OpenAI Agents SDK: they know a base URL and a key, and are trained.

    penstock run recipes/openai_agent.yaml &            # no agent workers: all episodes are left to this file
    source runs/openai-agent/connect.env
    python -m penstock.recipes.openai_agent.agent --url http://127.0.0.1:8100

Nothing of the SDK is changed. `--api responses` speaks the Responses API instead of chat completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from typing import Any

import httpx

from penstock.sandbox import SandboxConfig, make_sandbox
from penstock.tools import EpisodeBox, PythonTool, ToolInfraError

try:
    from agents import (
        Agent,
        AgentsException,
        FunctionTool,
        MaxTurnsExceeded,
        Model,
        ModelBehaviorError,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )
    from openai import APIError, AsyncOpenAI
except ImportError as missing:
    raise SystemExit(f"{missing}: pip install openai-agents") from None

WAIT_S = 20.0
"""Time that one `POST /episodes` may wait for work."""
MAX_TURNS = 4
MODELS: dict[str, type[OpenAIChatCompletionsModel | OpenAIResponsesModel]] = {
    "chat": OpenAIChatCompletionsModel,
    "responses": OpenAIResponsesModel,
}
log = logging.getLogger("openai_agent")


async def main(url: str, token: str, api: str, concurrency: int) -> int:
    """Run episodes until the run gives none any more. Returns how many were finished."""
    set_tracing_disabled(True)  # the SDK would send its traces to api.openai.com
    sandbox = make_sandbox(SandboxConfig(), "openai-agent", None)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_S + 60) as server:
            done = await asyncio.gather(*(_agent(server, PythonTool(sandbox), api) for _ in range(concurrency)))
    finally:
        await sandbox.close()
    return sum(done)


async def _agent(server: httpx.AsyncClient, python: PythonTool, api: str) -> int:
    """One episode after the other."""
    loop, finished = asyncio.get_running_loop(), 0
    last = loop.time()
    while loop.time() - last < 120.0:  # without an episode for so long the run is taken to have ended
        try:
            opened = await server.post("/episodes", json={"wait_s": WAIT_S})
        except httpx.TransportError as error:
            log.info("the rollout server is not there: %r", error)
            await asyncio.sleep(1)
            continue
        if opened.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # nothing to do now, or a server that goes
            await asyncio.sleep(float(opened.headers.get("Retry-After", "1")))
            continue
        opened.raise_for_status()
        finished += await _episode(server, opened.json(), python, api)
        last = loop.time()
    return finished


async def _episode(server: httpx.AsyncClient, episode: dict[str, Any], python: PythonTool, api: str) -> bool:
    """One task, from its messages to its reward, which the recipe's `agent.reward` computes."""
    state = python.box(episode["handle"])
    try:
        async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"]) as client:
            model: Model = MODELS[api](episode["model"], client)
            agent = Agent(name="calculator", model=model, tools=[_as_sdk_tool(python, state)])
            end = {"outcome": "completed"}
            try:
                await Runner.run(agent, episode["task"]["messages"], max_turns=MAX_TURNS)
            except MaxTurnsExceeded:
                end = {"outcome": "truncated", "reason": "turns"}
            except ModelBehaviorError as error:  # called what there is not, or with arguments of another form
                end = {"outcome": "policy_error", "reason": str(error)[:500]}
            except (APIError, AgentsException, ToolInfraError) as error:
                end = {"outcome": "infra_error", "reason": str(error)[:500]}
    finally:
        await python.release(state)
    try:
        answer = await server.post(f"/episodes/{episode['handle']}/finish", json=end)
    except httpx.TransportError as error:
        log.warning("%s is not finished, its lease runs out and it is given anew: %r", episode["handle"], error)
        return False
    return answer.is_success


def _as_sdk_tool(python: PythonTool, state: EpisodeBox) -> FunctionTool:
    """Penstock's sandboxed interpreter under the SDK's interface; one interpreter per episode."""

    async def invoke(_context: Any, arguments: str) -> str:
        try:
            call = json.loads(arguments)
            return (await python.execute(state, {"code": str(call["code"])})).text
        except (ValueError, KeyError, TypeError) as error:
            return f"Error: arguments are not {{'code': text}}: {error}"

    return FunctionTool(
        name=python.name,
        description=python.description,
        params_json_schema=dict(python.parameters),
        on_invoke_tool=invoke,
        strict_json_schema=False,  # else the SDK adds keys to the schema, and the prompt is another
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a rollout server of the run: rollout.port of the recipe")
    parser.add_argument("--api", choices=sorted(MODELS), default="chat")
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at once")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpx2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    count = asyncio.run(main(options.url, os.environ["PENSTOCK_TOKEN"], options.api, options.concurrency))
    log.info("%d episodes finished", count)
