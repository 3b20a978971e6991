"""The stock SGLang server as a child process: which Python runs it, with which flags, environment and model folder.

The server listens on loopback and requires a key on every route but its health. Only this process knows the key: a file
in a private folder passes it on, not the command line. SGLang writes it to its log, which is private too.

Only the caller's `stop_token_ids` end an answer. SGLang's `ignore_eos` would ignore those too, so the model folder that
it reads (`show_model`) names no end-of-sequence id: neither in config.json nor in generation_config.json, whose
sampling defaults would apply.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.adapters import ADAPTER_SLOTS
from penstock.rollout_server.engines.checkpoint import find_model
from penstock.rollout_server.engines.http.event_client import EngineAddress
from penstock.rollout_server.engines.http.flags import check_flags
from penstock.rollout_server.engines.http.server_process import (
    ChildServer,
    Installation,
    Product,
    flag_words,
    inherited_environment,
)
from penstock.rollout_server.engines.vllm.images import image_token_of
from penstock.rollout_server.protocol import EngineError

_LEFT_OUT = frozenset({"config.json", "generation_config.json"})
CONTEXT_SLACK = 8
"""SGLang keeps some positions of the context for itself; `max_model_len` is what requests may use."""
SGLANG = Product(
    title="SGLang",
    key="sglang",
    floor=(0, 5, 23),  # older ones lack the version spans of an answer, or die of a cache that cannot be flushed
    ceiling=(0, 5, 24),
    own_flags=frozenset(
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
    ),
    # torch takes seconds to import: it is asked only if there is a device that it may see
    probe="""
import importlib.metadata as metadata, json, os
versions = {d: metadata.version(d) for d in ("sglang",) if list(metadata.distributions(name=d))}
gpu = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
if gpu and versions:
    import torch
    gpu = torch.cuda.is_available()
print(json.dumps({"versions": versions, "gpu": gpu}))
""",
    help_command=lambda installation: [installation.python, "-m", "sglang.launch_server", "--help"],
    requantises=(),  # under fp8 it replaces parameters by others without a loader: an update ends it
)


def show_model(model: str, folder: Path) -> Path:
    """Make `folder` a view of `model`, a folder or a name in the hub's cache. Raises `EngineError`."""
    source = find_model(model)
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in _LEFT_OUT:
            (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").write_text(json.dumps(_without_eos(_config(source))))
    return folder


def _config(source: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"model {source}: no readable config.json: {error}", retryable=False) from error
    return config


def _without_eos(config: dict[str, Any]) -> dict[str, Any]:
    """Null, not left out: some architectures have a default of their own. The text part's too."""
    changed = config | {"eos_token_id": None}
    if isinstance(text := config.get("text_config"), dict):
        changed["text_config"] = _without_eos(text)
    return changed


class SGLangServer(ChildServer):
    """One SGLang process group."""

    product = SGLANG
    ready_path = "/model_info"
    _port: socket.socket | None = None
    """Held for the server's life."""

    async def stop(self) -> None:
        await super().stop()
        self._free_port()

    def _free_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    async def find_installation(self) -> Installation:
        return await find_installation(self.config)

    def prepare(self, installation: Installation) -> tuple[EngineAddress, list[str], dict[str, str]]:
        if installation.cpu and image_token_of(find_model(self.model)) is not None:
            raise EngineError(
                f"{self.model} sees images: SGLang's part that reads them needs compiled kernels, which have no build "
                "for CPUs; rollout.engine hf or vllm takes the model",
                retryable=False,
            )
        self._free_port()
        self._port, key = held_port(), secrets.token_hex(32)
        port = self._port.getsockname()[1]
        words = flags(self._defaults(installation), self.config.sglang_args, self.config.pause)
        words += ["--model-path", str(show_model(self.model, self.folder / "model"))]
        keys = self.folder / "keys.yaml"  # hands the key over
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"api-key: {key}\n")
        words += ["--port", str(port), "--config", str(keys)]
        command = [installation.python, "-m", "sglang.launch_server", *words]
        ranks = ranks_of(self.config.sglang_args)
        # No connection is kept: the server closes idle ones after 5 s.
        address = EngineAddress(f"http://127.0.0.1:{port}", key)
        return address, command, environment(installation, self.config.threads, self.folder, ranks)

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
            "disable-overlap-schedule": installation.cpu or self.config.pause == "keep",
            "skip-server-warmup": True,
            "sleep-on-idle": True,
            "grammar-backend": "none",
        }
        if rank := self.config.adapter_rank:  # the model without an adapter takes a place too
            ours |= {"enable-lora": True, "max-lora-rank": rank, "max-loras-per-batch": ADAPTER_SLOTS + 1}
            ours["lora-target-modules"] = "all"
        if self.config.routing_replay:
            ours["enable-return-routed-experts"] = True
        return ours | (self._cpu_defaults() if installation.cpu else self._gpu_defaults())

    def _gpu_defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {}
        if self.sleep_level:
            # With a copy in host memory, versions that were never announced survive too: the model itself is one.
            defaults |= {"enable-memory-saver": True, "enable-weights-cpu-backup": self.sleep_level == 1}
        if self.config.kv_offload_gb:
            # SGLang takes what each rank of a server has.
            ranks = ranks_of(self.config.sglang_args)
            if self.config.kv_offload_gb < ranks:
                raise EngineError(
                    f"rollout.kv_offload_gb: {self.config.kv_offload_gb} GB for {ranks} ranks of SGLang, which takes "
                    f"whole GB for each; set it to {ranks} or more",
                    retryable=False,
                )
            defaults |= {"enable-hierarchical-cache": True, "hicache-size": (self.config.kv_offload_gb // ranks)}
        return defaults

    def _cpu_defaults(self) -> dict[str, Any]:
        if self.config.adapter_rank:
            raise EngineError(
                "rollout.adapter_rank: SGLang pins memory for adapters, which needs a GPU; on CPUs rollout.engine vllm "
                "and hf have them",
                retryable=False,
            )
        if self.config.kv_offload_gb:
            raise EngineError(
                "rollout.kv_offload_gb: on CPUs SGLang has its KV cache in host memory already; set it to 0 and "
                "rollout.kv_cache_tokens to what that cache shall hold",
                retryable=False,
            )
        return {
            "device": "cpu",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "max-total-tokens": self.config.kv_cache_tokens,
            "disable-cuda-graph": True,
        }


async def find_installation(config: RolloutConfig) -> Installation:
    """The environment to use; one that is untested or unprepared is refused, as are flags that it does not know.
    Raises `EngineError` with the fix."""
    python = SGLANG.find_python(config.sglang_python)
    probe = await SGLANG.ask(python)
    version = SGLANG.check_version(python, probe["versions"].get("sglang"))
    installation = Installation(python, version, cpu=not probe["gpu"])
    await check_flags(SGLANG, installation, config.sglang_args)
    return installation


def environment(installation: Installation, threads: int, folder: Path, ranks: int = 1) -> dict[str, str]:
    """Environment of the server process. The user's variables for SGLang stay, except those that the adapter sets."""
    defaults = {"HF_HUB_OFFLINE": "1"} if installation.cpu else {}
    if installation.cpu and ranks > 1:
        # Without it SGLang takes no more ranks than the machine has NUMA nodes.
        defaults["SGLANG_CPU_OMP_THREADS_BIND"] = cores_by_rank(ranks, sorted(os.sched_getaffinity(0)))
    needed = {
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by `CONTEXT_SLACK`, which no request uses
        "TMPDIR": str(folder),  # the sockets between SGLang's processes, which trust every writer
    }
    if installation.cpu:
        needed["SGLANG_USE_CPU_ENGINE"] = "1"
    return {**defaults, **inherited_environment(), **needed}


def ranks_of(users: Mapping[str, Any]) -> int:
    """Returns the number of ranks of the server, from its flags under any of their names."""
    flags = {name.replace("_", "-"): value for name, value in users.items()}
    ways = [("tp-size", "tensor-parallel-size", "tp"), ("pp-size", "pipeline-parallel-size", "pp")]
    if not flags.get("enable-dp-attention"):  # with it data parallelism is among the ranks of tensor parallelism
        ways.append(("dp-size", "data-parallel-size", "dp"))
    return math.prod(int(next((flags[name] for name in names if flags.get(name)), 1)) for names in ways)


def cores_by_rank(ranks: int, cores: Sequence[int]) -> str:
    """Equal shares of `cores`, as SGLang writes them: "0,1|2,3". If there are fewer than ranks, they are shared."""
    each = max(1, len(cores) // ranks)
    firsts = [rank * each % len(cores) for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in cores[first : first + each]) for first in firsts)


def flags(ours: dict[str, Any], users: dict[str, Any], pause: str) -> list[str]:
    """Command line; raises `EngineError` where the adapter needs its own flag."""
    merged = SGLANG.merge_flags(ours, users)
    if pause == "keep" and not merged.get("disable-overlap-schedule", True):
        # A frozen overlapped schedule holds one sampled token per request that the next version would be credited with.
        raise EngineError("rollout.pause=keep needs disable_overlap_schedule; take pause=recompute", retryable=False)
    return flag_words(merged, negative=False)


def held_port() -> socket.socket:
    """A socket bound to a loopback port on which SGLang can listen. Linux assigns the port to no other socket and to no
    outgoing connection until SGLang binds it, half a minute later.

    Of two sockets with SO_REUSEADDR both may have the port as long as one of them does not listen.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
    except BaseException:
        listener.close()
        raise
    return listener
