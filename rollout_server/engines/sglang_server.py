"""The stock SGLang server as a child process: which Python runs it, with which flags, how it starts and ends.

The server listens on loopback and asks for a key on every route but its health. Only this process knows the key: it is
handed over in a file of a private folder, not on the command line. SGLang writes it to its log, so that is private too.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_server import ChildServer
from penstock.rollout_server.engines.sglang_model import show_model
from penstock.rollout_server.protocol import EngineError

MIN_VERSION = (0, 5, 23)
"""Older ones lack the version spans of an answer, or die of a cache that cannot be flushed."""
CONTEXT_SLACK = 8
"""SGLang keeps some positions of the context for itself; `max_model_len` is what requests may use."""
_MEND = "scripts/setup-sglang makes the environment; rollout.sglang_python may name another one"
_OURS = frozenset(
    {
        "model-path",
        "host",
        "port",
        "config",
        "api-key",
        "admin-api-key",
        "weight-version",
        "skip-tokenizer-init",
        "incremental-streaming-output",
    }
)
_PROBE = """
import importlib.metadata as metadata, json, torch
versions = [metadata.version("sglang")] if list(metadata.distributions(name="sglang")) else []
print(json.dumps({"versions": versions, "gpu": torch.cuda.is_available()}))
"""


@dataclass(frozen=True)
class Installation:
    """A Python environment that holds SGLang."""

    python: str
    version: str
    cpu: bool
    """Its torch sees no GPU."""


class SGLangServer(ChildServer):
    """One server process, its private folder and its log."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        super().__init__("SGLang", log_dir / "sglang.log", config.start_timeout_s)
        self.config = config
        self.model = model
        self.seed = seed
        self.folder = Path()
        """Private to this user: the key, SGLang's own sockets, links to weights. It goes with the server."""

    async def start(self) -> Installation:
        """Returns when the server answers; raises `EngineError` with the log's end where it does not in time."""
        installation = await find_installation(self.config)
        words = flags(self._defaults(installation), self.config.sglang_args, self.config.pause)
        port, key = free_port(), secrets.token_urlsafe(32)
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-sglang-"))
        self.http = _client(port, key)
        try:
            keys = self._make_private(key)
            shown = show_model(self.model, self.folder / "model")
            words += ["--model-path", str(shown), "--port", str(port), "--config", str(keys)]
            command = [installation.python, "-m", "sglang.launch_server", *words]
            await self.spawn(command, environment(installation, self.config.threads, self.folder))
            await self.until_answering("/model_info")
        except BaseException:
            await self.stop()
            raise
        return installation

    async def stop(self) -> None:
        """End the whole process group; a second call does nothing."""
        folder, self.folder = self.folder, Path()
        if folder == Path():
            return
        await self.http.aclose()
        await self.end()
        shutil.rmtree(folder, ignore_errors=True)

    def _defaults(self, installation: Installation) -> dict[str, Any]:
        ours = {
            "host": "127.0.0.1",
            "dtype": self.config.dtype,
            "context-length": self.config.max_model_len + CONTEXT_SLACK,
            "max-running-requests": self.config.max_concurrent,
            "random-seed": self.seed,
            "weight-version": "0",
            "skip-tokenizer-init": True,
            "incremental-streaming-output": True,
            "disable-overlap-schedule": True,
            "skip-server-warmup": True,
            "sleep-on-idle": True,
            "grammar-backend": "none",
        }
        return ours | (self._cpu_defaults() if installation.cpu else {})

    def _cpu_defaults(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "max-total-tokens": self.config.kv_cache_tokens,
            "disable-cuda-graph": True,
        }

    def _make_private(self, key: str) -> Path:
        """The file that hands the key over."""
        path = self.folder / "keys.yaml"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"api-key: {key}\n")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.touch(mode=0o600)
        return path


async def find_installation(config: RolloutConfig) -> Installation:
    """The environment to use, old and unprepared ones refused. Raises `EngineError` with the mend."""
    python = find_python(config.sglang_python)
    found = await _probe(python)
    if not found["versions"]:
        raise EngineError(f"{python} has no SGLang; {_MEND}", retryable=False)
    version: str = found["versions"][0]
    if _numbers(version) < MIN_VERSION:
        floor = ".".join(map(str, MIN_VERSION))
        raise EngineError(f"SGLang {version} in {python} is older than {floor}; {_MEND}", retryable=False)
    return Installation(python, version, cpu=not found["gpu"])


def find_python(configured: str | None) -> str:
    """`configured`, else .venv-sglang in this folder or one above it, else this interpreter."""
    if configured is not None:
        if not os.access(configured, os.X_OK):
            raise EngineError(f"rollout.sglang_python: {configured} cannot be run; {_MEND}", retryable=False)
        return configured
    here = Path.cwd()
    candidates = [folder / ".venv-sglang/bin/python" for folder in (here, *here.parents)]
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
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise EngineError(f"{python} cannot be asked for SGLang: {reason}; {_MEND}", retryable=False)
    found: dict[str, Any] = json.loads(output)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23", "0.5.23rc1" and "0.5.23+local"."""
    found = []
    for part in version.split("+", maxsplit=1)[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        found.append(int(digits or 0))
    return tuple(found)


def environment(installation: Installation, threads: int, folder: Path) -> dict[str, str]:
    """Of the server process. What the user set for SGLang stays, except what the adapter depends on."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    defaults = {"HF_HUB_OFFLINE": "1"} if installation.cpu else {}
    needed = {
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by `CONTEXT_SLACK`, which no request uses
        "TMPDIR": str(folder),  # the sockets between SGLang's processes, which trust whoever writes to them
    }
    if installation.cpu:
        needed["SGLANG_USE_CPU_ENGINE"] = "1"
    return {**defaults, **inherited, **needed}


def flags(ours: dict[str, Any], users: dict[str, Any], pause: str) -> list[str]:
    """Command line; a user's flag replaces ours of that name. Raises `EngineError` where the adapter needs its own."""
    given = {name.replace("_", "-"): value for name, value in users.items()}
    if taken := sorted(given.keys() & _OURS):
        raise EngineError(f"rollout.sglang_args.{taken[0]} is set by Penstock itself; remove it", retryable=False)
    if pause == "keep" and not given.get("disable-overlap-schedule", True):
        # A frozen overlapped schedule holds one sampled token per request that the next version would be credited with.
        raise EngineError("rollout.pause=keep needs disable_overlap_schedule; take pause=recompute", retryable=False)
    return [word for name, value in {**ours, **given}.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None or value is False:  # SGLang's switches have no negative form
        return []
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def free_port() -> int:
    """A loopback port that is free now; should another process take it before SGLang does, the start fails by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _client(port: int, key: str) -> httpx.AsyncClient:
    # No connection is kept: the server closes idle ones after 5 s, and one closed just when we write loses a request.
    limits = httpx.Limits(max_keepalive_connections=0, max_connections=None)
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(limits=limits),
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(60.0),
    )
