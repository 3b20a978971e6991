"""The processes of a run, wherever they are placed, and the GPUs of each on one machine.

The trainer's ranks get the first GPUs, servers the ones that follow:

    8 GPUs, trainer.ranks=4, 2 servers split over 2 each:   trainer 0 1 2 3   rollout-0 4 5   rollout-1 6 7
    the same, placement.colocated:                          trainer 0 1 2 3   rollout-0 0 1   rollout-1 2 3
    the first, placement.lend:      as above, and   rollout-lent-0 0 1   rollout-lent-1 2 3
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penstock.common.device_locks import named_gpus
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import RunConnection
from penstock.deploy.run.processes import RoleSpec
from penstock.deploy.run_dir import RunDir
from penstock.rollout_server import RolloutConfig
from penstock.sandbox.managed import KEYS
from penstock.trainer import TrainerConfig

Kind = Literal["rollout", "agent", "trainer", "dashboard"]
NODES_VARIABLE = "PENSTOCK_TRAIN_NODES"
"""Number of machines of the trainer."""
TRAINER_STOP_S = 25.0
"""Time for the last checkpoint if `trainer.stop_grace_s` is not set (`preflight.stop_grace` derives it)."""
TORCHRUN_S, SUPERVISOR_S = 5.0, 15.0
"""Time that torchrun and the supervisor wait beyond the trainer's own grace before they kill it."""
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds between torchrun's SIGTERM to its ranks and SIGKILL."""
SUPERVISED = {"PENSTOCK_SUPERVISED": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of every process that a head supervises."""


@dataclass(frozen=True)
class Role:
    """One process of a run, before its machine is known."""

    name: str
    kind: Kind
    words: tuple[str, ...]
    """Words of the `penstock` command line; never secrets."""
    env: Mapping[str, str] = field(repr=False)
    """Added to the environment of its machine; this role's secrets are here."""
    max_restarts: int
    stop_grace_s: float = 15.0
    number: int | None = None
    """Number among the roles of its kind that may be added and removed; None: it may not."""
    lent: int | None = None
    """A rollout server's place on the trainer's devices, which it has between steps; None: it has its own."""

    @property
    def is_one_of_several(self) -> bool:
        """Return True for a rollout server if other servers can take its requests."""
        return self.kind == "rollout" and (self.number is not None or self.lent is not None)

    def spec(self, logs: Path, cwd: Path | None = None) -> RoleSpec:
        """Return the command and environment with which this machine starts the role."""
        argv = [sys.executable, "-m", "penstock.deploy.cli", *self.words]
        # Keys of sandbox providers are for those alone that make boxes.
        hidden = frozenset() if self.kind == "agent" else frozenset(name for names in KEYS.values() for name in names)
        env = {**{name: value for name, value in os.environ.items() if name not in hidden}, **self.env}
        return RoleSpec(self.name, argv, env, logs / f"{self.name}.log", self.max_restarts, self.stop_grace_s, cwd)


def roles_of(config: RunConfig, link: RunConnection) -> list[Role]:
    """The run's processes as its recipe counts them, the trainer last."""
    rollouts = [rollout_role(config, link, number) for number in range(config.rollout.servers)]
    if config.rollout.evaluation_server:
        rollouts.append(_server_role(config, link, "rollout-eval", len(rollouts), "--evaluates"))
    for place in range(lent_servers(config)):
        role = _server_role(config, link, f"rollout-lent-{place}", len(rollouts), "--lent")
        rollouts.append(replace(role, lent=place))
    agents = [agent_role(config, link, number) for number in range(config.agent.workers)]
    return [*rollouts, *agents, _trainer_role(config, link)]


def _trainer_role(config: RunConfig, link: RunConnection) -> Role:
    """One rank of this Python is started as such; `penstock train` finds out what else there is to start."""
    trainer = config.trainer
    alone = trainer.ranks == 1 and trainer.engine != "megatron" and os.environ.get(NODES_VARIABLE, "1") in ("", "1")
    words, stop_s = ("train-rank", "--alone") if alone else ("train",), trainer_stop_s(trainer) + SUPERVISOR_S
    role = _role(link, "trainer", "trainer", *words, max_restarts=trainer.max_restarts, stop_grace_s=stop_s)
    return replace(role, env={**role.env, **rank_environment(trainer)}) if alone else role


ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def rank_environment(trainer: TrainerConfig) -> dict[str, str]:
    """Return the variables of a rank's process that torch reads when it is loaded."""
    environment = {"OMP_NUM_THREADS": str(trainer.threads or 1)}
    if not ALLOCATOR_VARIABLES & os.environ.keys():
        # Packs are of many lengths. Without it what one leaves free on a GPU is in pieces that do not hold the next.
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return environment


def trainer_stop_s(trainer: TrainerConfig) -> float:
    """Return the seconds from SIGTERM that the trainer has for its last checkpoint."""
    return TRAINER_STOP_S if trainer.stop_grace_s is None else trainer.stop_grace_s


def rollout_role(config: RunConfig, link: RunConnection, number: int) -> Role:
    return replace(_server_role(config, link, f"rollout-{number}", number), number=number)


def _server_role(config: RunConfig, link: RunConnection, name: str, index: int, *flags: str) -> Role:
    """The rollout server at the `index`-th port of the recipe, or at a free one."""
    port = str(config.rollout.port and config.rollout.port + index)
    words = ("rollout", "--name", name, "--port", port, *flags)
    return _role(link, name, "rollout", *words, max_restarts=config.rollout.max_restarts)


def agent_role(config: RunConfig, link: RunConnection, number: int) -> Role:
    name = f"agent-{number}"
    role = _role(link, name, "agent", "agent", "--name", name, max_restarts=config.agent.max_restarts)
    return replace(role, number=number)


def service_roles(config: RunConfig, link: RunConnection, api: Sequence[str], model_name: str) -> list[Role]:
    """The processes of `penstock serve`; `api`: the words behind ``service-api``. Both may do with Redis what the owner
    may: what clients ask for is in keys of its own."""
    rollouts = [rollout_role(config, link, number) for number in range(config.rollout.servers)]
    stop_s = trainer_stop_s(config.trainer) + SUPERVISOR_S
    words = ("service-trainer", "--model-name", model_name)
    trainer = _role(
        link,
        "trainer",
        "trainer",
        *words,
        rights="owner",
        max_restarts=config.trainer.max_restarts,
        stop_grace_s=stop_s,
    )
    trainer = replace(trainer, env={**trainer.env, **rank_environment(config.trainer)})
    # A service's API process holds nothing, so it may restart often.
    front = _role(link, "api", "agent", "service-api", *api, rights="owner", max_restarts=1000)
    return [*rollouts, front, trainer]


def page_roles(config: RunConfig, run: RunDir, link: RunConnection) -> list[Role]:
    """The page of the run, if it is configured. An agent's rights are enough to queue dead letters again."""
    page = config.dashboard
    if not page.enabled:
        return []
    words = ("dashboard", str(run.root.parent), "--host", page.host, "--port", str(page.port))
    return [_role(link, "dashboard", "dashboard", *words, rights="agent", max_restarts=3)]


def _role(
    link: RunConnection,
    name: str,
    kind: Kind,
    *words: str,
    rights: str = "",
    max_restarts: int,
    stop_grace_s: float = 15.0,
) -> Role:
    env = {**link.of_role(rights or kind).environment(), **SUPERVISED, "OMP_NUM_THREADS": "1"}
    return Role(name, kind, words, env, max_restarts, stop_grace_s)


ADDED = {"rollout": rollout_role, "agent": agent_role}
"""Factories of the role kinds that can be scaled at run time."""
logger = logging.getLogger("penstock.run")
DRIVER = Path("/dev/nvidiactl")
VARIABLE = "CUDA_VISIBLE_DEVICES"
LOADS_AFTER_VARIABLE = "PENSTOCK_LOADS_AFTER"
"""Rollout servers, separated by commas, that have a GPU of the trainer's too: its model is loaded after theirs."""
ASK_S = 60.0
"""A driver that was not used since the machine started is slow."""


def has_gpu() -> bool:
    """An NVIDIA driver is here; asked without loading torch."""
    return DRIVER.exists()


def gpus_of_server(rollout: RolloutConfig) -> int:
    """GPUs that one rollout server computes on; 0: the `hf` engine computes on CPUs."""
    arguments: Mapping[str, Any] | None = {"vllm": rollout.vllm_args, "sglang": rollout.sglang_args}.get(rollout.engine)
    if arguments is None:
        return 0
    plain = {name.replace("-", "_"): value for name, value in arguments.items()}
    count = 1
    # The ways in which one server takes more GPUs, in vLLM and SGLang. Experts are shared out among those of tensor and
    # data parallelism: expert parallelism takes none of its own.
    ways = (
        ("tensor_parallel_size", "tp_size", "tp"),
        ("pipeline_parallel_size", "pp_size", "pp"),
        ("data_parallel_size", "dp_size", "dp"),
        ("prefill_context_parallel_size",),
    )
    for names in ways:
        # With this argument SGLang's data parallelism is among the GPUs of its tensor parallelism.
        if "dp_size" not in names or not plain.get("enable_dp_attention"):
            count *= int(next((plain[name] for name in names if plain.get(name)), 1))
    return count


def lent_servers(config: RunConfig) -> int:
    """Rollout servers on the trainer's devices, besides `rollout.servers`; where those are CPUs, one."""
    if not config.placement.lend:
        return 0
    each = gpus_of_server(config.rollout)
    return config.trainer.ranks // each if each else 1


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists, as CUDA names them."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        gpus = named_gpus(named)
        if named.strip() == "all":
            logger.warning("%s is 'all', which CUDA takes for none: unset it, or write the GPUs' numbers", VARIABLE)
        return gpus
    try:
        return _ask_driver("index") if has_gpu() else ()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("nvidia-smi does not say which GPUs there are (%s): roles share what each of them finds", error)
        return ()


def smallest_gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None if there is none, or the driver does not say."""
    try:
        sizes = _ask_driver("memory.total") if has_gpu() else ()
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(mebibytes) << 20 for mebibytes in sizes if mebibytes.isdecimal()), default=None)


def _ask_driver(what: str) -> tuple[str, ...]:
    """Return a property of each GPU. Raises `OSError`, `SubprocessError`."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    return tuple(done.stdout.split())


def gpus_of(role: Role, config: RunConfig, gpus: Sequence[str]) -> tuple[str, ...] | None:
    """The role's own of `gpus`. None: it is left with what its environment says, as agent workers and the page are.

    If there are too few, servers begin again with the first: they share devices (`penstock doctor` warns of it).
    """
    if not gpus or (role.kind == "rollout" and not gpus_of_server(config.rollout)):
        return None
    if role.kind == "trainer":
        return tuple(gpus[: config.trainer.ranks])
    if role.kind != "rollout":
        return None
    if role.lent is not None:
        return tuple(gpus[index] for index in places_of_server(config, role.lent, len(gpus), lent=True))
    number = config.rollout.servers if role.number is None else role.number  # the evaluation server has none
    return tuple(gpus[index] for index in places_of_server(config, number, len(gpus)))


def places_of_server(config: RunConfig, number: int, count: int, *, lent: bool = False) -> list[int]:
    """Which of `count` GPUs rollout server `number`, or the lent one of that number, computes on."""
    each = gpus_of_server(config.rollout)
    start = number * each + (0 if config.placement.colocated or lent else config.trainer.ranks)
    return [(start + i) % count for i in range(min(each, count))]


RENDEZVOUS_VARIABLE = "PENSTOCK_TRAIN_RENDEZVOUS"
TORCHRUN_TELLS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables: a rank that has none of them is alone. Another's torchrun may have started this process."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of the ranks of one machine, or of several."""

    nodes: int = 1
    node_rank: int = 0
    """Node 0 has rank 0, which serves the weights and writes the run's records: the head's own machine."""
    endpoint: str = ""
    """HOST:PORT on node 0; empty on one machine."""

    @classmethod
    def of(cls, nodes: int | None, node_rank: int, endpoint: str | None) -> Rendezvous:
        """Explicit values win over the environment. Raises `ConfigError`."""
        named = os.environ.get(NODES_VARIABLE) or "1"
        if nodes is None and not re.fullmatch(r"[1-9]\d*", named):
            raise ConfigError(f"{NODES_VARIABLE}={named!r} is not a number of machines")
        nodes = nodes or int(named)
        endpoint = endpoint or os.environ.get(RENDEZVOUS_VARIABLE) or ""
        if nodes > 1 and not re.fullmatch(r".+:\d+", endpoint):
            raise ConfigError(f"--rdzv-endpoint or {RENDEZVOUS_VARIABLE}: {nodes} machines need HOST:PORT of machine 0")
        if node_rank >= nodes:
            raise ConfigError(f"--node-rank {node_rank}: must be less than --nnodes {nodes}")
        return cls(nodes, node_rank, endpoint)

    def arguments(self, ranks: int, run: str, folder: Path) -> list[str]:
        """Return the arguments of torchrun; the ranks of one machine meet in `folder`. `ranks`: of all machines, see
        `check_nodes`.
        """
        logs = ("--log-dir", str(folder / "torchrun"))  # nothing is written there; without it, it leaves one in $TMPDIR
        if self.nodes == 1:
            # Not --standalone: its store listens on every address of the machine.
            return [
                *logs,
                *("--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1", "--rdzv-id", run),
                *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(folder / "nodes")),
            ]
        per_node = str(ranks // self.nodes)
        # A machine that is restarted waits ten minutes for the others.
        return [
            *logs,
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank), "--nproc-per-node", per_node),
            *("--rdzv-backend", "static", "--rdzv-endpoint", self.endpoint, "--rdzv-id", run),
            *("--rdzv-conf", "timeout=600"),
        ]
