"""One episode of an environment of verifiers (API v1) on the model of this episode, run by the loop `command`.

    python3 verifiers_episode.py TASKSET NUMBER [SETTINGS as JSON]

NUMBER is that of a task in the order of the taskset; SETTINGS are what `env.*` is for verifiers' own `eval`, such as
{"taskset": {"difficulty": 2}}. The reward of the task goes to ~/reward.json. Ends with 1 if verifiers reports an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def prepare_here(self: SubprocessRuntime, script: str | bytes, env: Any = None, **further: Any) -> list[str]:
    """Return the command of a harness's program. Its packages are among those of verifiers: a box reaches no index."""
    data = script.encode() if isinstance(script, str) else script
    name = f".{hashlib.sha256(data).hexdigest()}.py"
    await self.write(name, data)
    return [sys.executable, name]


SubprocessRuntime.prepare_uv_script = prepare_here


async def main(name: str, number: str, settings: str = "{}") -> int:
    tree = json.loads(settings)
    config = resolve_env_config({**tree, "taskset": {**tree.get("taskset", {}), "id": name}})
    here = {"runtime": vf.SubprocessConfig()}  # programs and tools of the environment run in this box
    agents = {role: agent.model_copy(update=here) for role, agent in agent_config_fields(config).items()}
    environment = load_environment(config.model_copy(update=agents))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client, sampling=SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task_of(environment.taskset, int(number)), context)
    errors = [str(error) for part in (episode, *episode.traces) for error in part.errors]
    if strangers := [trace.agent.name for trace in episode.traces if not trace.agent.trainable]:
        errors.append(f"agents that are not trained, whose calls would be: {', '.join(map(str, strangers))}")
    result = {
        "reward": sum(trace.reward for trace in episode.traces) / max(1, len(episode.traces)),
        "metrics": {name: one.score for trace in episode.traces for name, one in trace.rewards.items() if one}
        | {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None},
    }
    (Path.home() / "reward.json").write_text(json.dumps(result))
    print("\n".join(errors), file=sys.stderr)
    return 1 if errors or not episode.ok else 0


def task_of(taskset: vf.Taskset, number: int) -> vf.Task:
    """Return the task of this number; a finite taskset begins again after its last one."""
    if taskset.bounded:
        tasks = list(taskset)
        return tasks[number % len(tasks)]
    return next(itertools.islice(taskset, number, None))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
