"""`reasoning_gym:TASK` in a recipe's data section: problems of the package reasoning-gym, made at the run's start.

    reasoning_gym:chain_sum?size=1000&seed=0&max_terms=3
    reasoning_gym:chain_sum,leg_counting?size=1000&system=direct

Options but `size`, `seed`, `system` and `path` are those of the task's own configuration. Rows hold task,
configuration and number, from which the reward `reasoning_gym` makes the problem again: its entries are not all JSON.
The package runs in a separate process, with the folder `path` before others.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from penstock.datasets.rows import BadSpec, Row, write_parquet

PREFIX = "reasoning_gym:"
DEADLINE_S = 600.0
PROGRAM = """
import json, sys
import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS

asked = json.load(sys.stdin)
made = {"system": SYSTEM_PROMPTS[asked["system"]], "tasks": []}
for name in asked["tasks"]:
    problems = reasoning_gym.create_dataset(name, **asked["config"])
    found = [problems[number] for number in range(asked["config"]["size"])]
    made["tasks"].append([[entry["question"], str(entry["answer"])] for entry in found])
json.dump(made, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class GymTasks:
    """A source, read."""

    tasks: tuple[str, ...]
    config: Mapping[str, Any]
    """Configuration of each task, with `size` (rows of each) and `seed`."""
    system: str
    """Name of the package's own system prompt."""
    path: str

    def name(self) -> str:
        """Name of its file: another source has another one."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return f"{'-'.join(self.tasks)[:60]}-{digest}.parquet"


def check_tasks(source: str) -> GymTasks:
    """Raises `BadSpec`. Whether the package has such tasks is found out when they are made."""
    names, _, query = source.removeprefix(PREFIX).partition("?")
    tasks = tuple(name.strip() for name in names.split(","))
    if not all(name.isidentifier() for name in tasks):
        raise BadSpec(f"{source!r}: write {PREFIX}TASK or {PREFIX}TASK,TASK with names of reasoning-gym")
    options = {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    system, path = str(options.pop("system", "default")), str(options.pop("path", ""))
    config = {"size": 1000, "seed": 0, **options}
    for name in ("size", "seed"):
        if not isinstance(config[name], int) or isinstance(config[name], bool) or config[name] < (name == "size"):
            raise BadSpec(f"{source!r}: {name} must be a whole number, found {config[name]!r}")
    return GymTasks(tasks, config, system, path)


def write_tasks(source: str, directory: Path) -> Path:
    """The Parquet file of its rows below `directory`, tasks taking turns. Raises `BadSpec`."""
    spec = check_tasks(source)
    path = directory / spec.name()
    problems = _make_problems(source, spec)
    rows = [
        _row(spec, task, number, problems["system"], problems["tasks"][place][number])
        for number in range(spec.config["size"])
        for place, task in enumerate(spec.tasks)
    ]
    write_parquet(rows, path)
    return path


def _make_problems(source: str, spec: GymTasks) -> dict[str, Any]:
    question = {"tasks": spec.tasks, "config": dict(spec.config), "system": spec.system}
    path = os.pathsep.join(
        filter(None, [str(Path(spec.path).absolute()) if spec.path else "", os.environ.get("PYTHONPATH", "")])
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            input=json.dumps(question),
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BadSpec(f"{source!r}: {DEADLINE_S:.0f} s were not enough to make its problems; ask for fewer") from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        missing = "No module named 'reasoning_gym'" in words[0]
        fix = ": pip install reasoning-gym, or give its folder as path=FOLDER" if missing else ""
        raise BadSpec(f"{source!r}: {words[0]}{fix}")
    problems: dict[str, Any] = json.loads(done.stdout)
    return problems


def _row(spec: GymTasks, task: str, number: int, system: str, entry: tuple[str, str]) -> Row:
    question, answer = entry
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "system", "content": system.strip()}, {"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"task": task, "config": json.dumps(dict(spec.config)), "number": number},
    }


def _value(text: str) -> Any:
    """A number, true, false or null, a list; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
