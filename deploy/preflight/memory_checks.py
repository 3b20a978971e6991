"""Checks of the memory of this host, of a device that trainer and engines share, and of every recipe below a folder.

They refuse no run: the sums (`memory`) are estimates.

    one device  =  what a trainer's rank keeps on it  +  the share that each engine on it claims
    in turns    =  the larger one of the two  +  what sleeping processes keep

An engine claims a share of the whole device (vLLM's ``gpu_memory_utilization``, SGLang's ``mem_fraction_static``), and
its weights and the KV cache of one request must fit into that. Which device has what is as in `plan`: ranks get the
first, servers the ones that follow, from the first again if there are too few.

A recipe declares its GPUs in the comment that it begins with: ``8 GPUs of 80 GB``, or ``one GPU of 80 GB``. The sizes
of its model are those of the files that it names, else of the config.json in the hub's cache, or of one that ships.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.config import RunConfig, load_config
from penstock.deploy.preflight.check import Check, available_bytes, human, memory_bytes, skipped, warning
from penstock.deploy.preflight.memory import host_parts, in_flight_bytes, published_bytes, server_bytes
from penstock.deploy.preflight.model import BadModelFiles, read_weights
from penstock.deploy.preflight.model_shape import ModelShape, described_shape, find_shape, model_shape
from penstock.deploy.preflight.rank_memory import (
    ACTIVATIONS,
    GATHERED,
    REDUCED,
    context_bytes,
    device_parts,
    rank_bytes,
)
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import gpus_of_server, lent_servers, places_of_server
from penstock.deploy.run.weights_folder import SHARED_MEMORY
from penstock.trainer import TrainerConfig

FIXES = {
    "trainer": "lower trainer.micro_batch_tokens, set trainer.recompute=true, use trainer.lora.rank, or train on more "
    "machines' worth of ranks",
    "checkpoint": "use trainer.lora.rank, or take a smaller model: a save copies what learns before it is written",
    "offloaded activations": "lower trainer.micro_batch_tokens, or set trainer.recompute=true: inputs of layers alone "
    "then wait in host memory",
    "servers": "lower rollout.kv_cache_tokens or rollout.servers, or start servers on other machines",
    "copied weights": "train on more machines' worth of ranks: each keeps its share",
    "received weights": "set rollout.broadcast_receive=in_place: broadcasts then need no memory for a second version",
    "offloaded KV": "lower rollout.kv_offload_gb",
    "published weights": "set rollout.weight_transport=disk",
    "requests": "lower transfer_queue.max_bytes",
    "in flight": "lower max_staleness, groups_per_step or agent.max_response_tokens",
    "processes": "lower agent.workers, rollout.servers or trainer.ranks",
}
CLAIMS = {"vllm": ("gpu_memory_utilization", 0.9), "sglang": ("mem_fraction_static", 0.9)}
"""Each engine's name for its share of a device, and its approximate default."""
ENGINES = "engines"
PROCESS = "context and NCCL"
ASLEEP = "processes asleep"
OF_ENGINES = {ENGINES, ASLEEP}
USABLE = 0.9
"""Share of a device that a trainer fills; the rest is fragments of torch's allocator."""
RESIDUE = 3 << 29
"""About what a process keeps on its device while it sleeps: the driver's context, NCCL's buffers, CUDA graphs."""


# the host ------------------------------------------------------------------------------------------------------------
def check_memory(config: RunConfig) -> Iterator[Check]:
    shape = model_shape(config)
    if shape is None:
        yield skipped("memory", f"{config.model}: its size is unknown until its files are here")
        return
    yield check_host(host_parts(config, shape))
    needed, most = in_flight_bytes(config), config.transfer_queue.max_bytes
    detail = f"episodes in flight hold up to {human(needed)}, transfer_queue.max_bytes is {human(most)}"
    fix = f"set transfer_queue.max_bytes={int(needed * 1.2)}, or lower max_staleness: admission stops if it is full"
    name = "staleness in flight"
    yield Check(name, True, detail) if needed <= most else warning(name, detail, fix)


def check_host(parts: dict[str, float]) -> Check:
    total, have, free = sum(parts.values()), memory_bytes(), available_bytes()
    listed = ", ".join(f"{name} {human(size)}" for name, size in parts.items() if size >= 1 << 20)
    detail = f"about {human(total)} of {human(have)} ({listed})"
    fix = FIXES[max(parts, key=parts.__getitem__)]
    if total > have:
        return Check("memory", False, detail, fix)
    if total > free:
        return warning("memory", f"{detail}; {human(free)} are free now", f"end other programs, or {fix}")
    return Check("memory", True, detail)


def check_shared_memory(config: RunConfig) -> Check | None:
    """Checks that a published version fits into shared memory.

    Its size is read from the headers of the weights, because a model's config may name its sizes in another way.
    """
    try:
        weights = read_weights(Path(config.model))
    except BadModelFiles:  # `check_model` reports it
        return None
    if config.rollout.weight_transport == "disk" or weights is None:
        return None
    needed = published_bytes(weights.parameters, config)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Check(
        "shared memory",
        free > needed,
        f"{human(needed)} of {human(free)} free in {SHARED_MEMORY}",
        "free some, give the container more (--shm-size), or set rollout.weight_transport=disk",
    )


# one device ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one machine."""

    count: int
    bytes: int
    """Bytes per device."""


def check_device(name: str, config: RunConfig, shape: ModelShape, gpus: Gpus) -> Check:
    """The device that holds most; what a single engine needs of its share first."""
    each = gpus_of_server(config.rollout)
    needed = sum(server_bytes(shape, config, config.rollout.max_model_len).values()) / each if each else 0.0
    claimed = _claim(config) * gpus.bytes if each else 0.0
    if needed > claimed:
        key, detail = _claim_key(config), f"an engine needs {human(needed)} of each device"
        fix = f"raise {key}, split it over more GPUs (tensor_parallel_size, tp_size), or lower rollout.max_model_len"
        return Check(name, False, f"{detail}, {key} leaves it {human(claimed)} of {human(gpus.bytes)}", fix)
    parts = busiest(config, shape, gpus)
    total, limit = sum(parts.values()), limit_of(parts, gpus)
    listed = ", ".join(f"{part} {human(size)}" for part, size in parts.items() if size >= 1 << 20)
    detail = f"a device holds about {human(total)} of {human(limit)} that can be used ({listed or 'nothing'})"
    return Check(name, total <= limit, detail, "" if total <= limit else _fix(config, shape, gpus, parts))


def busiest(config: RunConfig, shape: ModelShape, gpus: Gpus) -> dict[str, float]:
    """Bytes by part of the device that is over its limit, else of the fullest that a rank is on."""
    rank, claim = device_parts(rank_bytes(shape, config, on_gpu=True), config.trainer), _claim(config) * gpus.bytes
    rank[PROCESS] = context_bytes(config.trainer)
    servers = config.rollout.servers + config.rollout.evaluation_server
    own = [place for number in range(servers) for place in places_of_server(config, number, gpus.count)]
    in_turns = [
        place
        for number in range(lent_servers(config))
        for place in places_of_server(config, number, gpus.count, lent=True)
    ]
    if config.placement.colocated:
        own, in_turns = [], own
    # Further ranks are on further machines of as many GPUs.
    devices: list[dict[str, float]] = []
    for index in range(gpus.count):
        on_it, awake, sleepers = (rank if index < config.trainer.ranks else {}), own.count(index), in_turns.count(index)
        if on_it and sleepers:
            devices.append({**on_it, ENGINES: awake * claim, ASLEEP: sleepers * RESIDUE})
            devices.append({ENGINES: (awake + sleepers) * claim, ASLEEP: RESIDUE})
        else:
            devices.append({**on_it, ENGINES: (awake + sleepers) * claim})

    def fullness(parts: Mapping[str, float]) -> float:
        """Sorts devices. An engine always fills its share of a separate device, so that says little."""
        share = sum(parts.values()) / limit_of(parts, gpus)
        return share if share > 1 or not parts.keys() <= OF_ENGINES else 0.0

    return max(devices, key=fullness)


def limit_of(parts: Mapping[str, float], gpus: Gpus) -> float:
    """An engine alone on a device leaves by its own share what others need."""
    return gpus.bytes if parts.keys() <= OF_ENGINES else USABLE * gpus.bytes


def _claim(config: RunConfig) -> float:
    """Share of a device that an engine takes; 0 for one that computes on CPUs. Raises `ConfigError` for no number."""
    if config.rollout.engine not in CLAIMS:
        return 0.0
    name, usual = CLAIMS[config.rollout.engine]
    arguments = config.rollout.vllm_args if config.rollout.engine == "vllm" else config.rollout.sglang_args
    settings = {key.replace("-", "_"): value for key, value in arguments.items()}
    try:
        return float(settings.get(name) or usual)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{_claim_key(config)}: {settings[name]!r} is not a share of a device, such as {usual}"
        ) from None


def _claim_key(config: RunConfig) -> str:
    return f"rollout.{config.rollout.engine}_args.{CLAIMS[config.rollout.engine][0]}"


CHANGES: Mapping[str, Mapping[str, Any]] = {
    "trainer.recompute=selective": {"recompute": "selective"},
    "trainer.recompute=true": {"recompute": True},
    "trainer.recompute=true trainer.activation_offload=true": {"recompute": True, "activation_offload": True},
    "trainer.offload=optimizer": {"offload": "optimizer"},
    "trainer.recompute=true trainer.offload=optimizer": {"recompute": True, "offload": "optimizer"},
    "trainer.offload=true": {"offload": True},
    "trainer.recompute=true trainer.offload=true": {"recompute": True, "offload": True},
}
"""Settings of the trainer that change nothing that is learned; the cheapest first."""


def _fix(config: RunConfig, shape: ModelShape, gpus: Gpus, parts: Mapping[str, float]) -> str:
    """The first change with which the sum holds, else the keys of the largest part."""
    for words, update in memory_changes(config.trainer).items():
        changed = config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})
        there = busiest(changed, shape, gpus)
        if sum(there.values()) <= limit_of(there, gpus):
            return f"set {words}: a device then holds about {human(sum(there.values()))}"
    return _fix_of_part(max(parts, key=parts.__getitem__), config, shape)


def _fix_of_part(part: str, config: RunConfig, shape: ModelShape) -> str:
    parallel = config.trainer.parallel
    if part == ENGINES:
        return f"lower {_claim_key(config)}, or start servers on other machines"
    if part == ACTIVATIONS:
        return "lower trainer.micro_batch_tokens and rollout.max_model_len, or raise trainer.parallel.context"
    if config.trainer.engine == "megatron":
        return "raise trainer.ranks, trainer.parallel.tensor or trainer.parallel.expert"
    if part in (GATHERED, REDUCED) and shape.experts and parallel.tensor == 1:
        return "raise trainer.parallel.expert: a rank then gathers and reduces a part of a layer's experts"
    if parallel.replicate > 1:
        return "lower trainer.parallel.replicate: each set of ranks holds all weights and moments"
    return "raise trainer.ranks, set trainer.lora.rank, or take a smaller model"


def memory_changes(trainer: TrainerConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return those of `CHANGES` that the trainer's engine takes, by their words."""
    if trainer.engine == "megatron":
        return {}
    chooses = {words for words, update in CHANGES.items() if update.get("recompute") == "selective"}
    refused = trainer.compile or trainer.activation_offload
    return {words: update for words, update in CHANGES.items() if not (refused and words in chooses)}


# recipes below a folder ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RecipeMemory:
    """One recipe's sum and the limit of the GPUs that its header declares."""

    recipe: str
    """Relative to the folder."""
    check: Check
    model: str = ""
    sizes: str = ""
    """Source of the model's sizes."""
    gpus: Gpus | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the fullest device."""

    @property
    def limit(self) -> float:
        """Bytes of a device that can be used; 0 where none is declared."""
        return limit_of(self.parts, self.gpus) if self.gpus else 0.0


HEADER = re.compile(r"\b(one|\d+) GPUs? of (\d+) GB\b", re.IGNORECASE)


def declared_gpus(recipe: Path) -> Gpus | None:
    """Return the GPUs that the comment at the head of the recipe names, or None. A card of 80 GB reports nearly as many
    GiB."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    match = HEADER.search(" ".join(line.lstrip("# ") for line in lines))
    if match is None:
        return None
    count = match[1].lower()
    return Gpus(1 if count == "one" else int(count), int(match[2]) << 30)


def check_recipes(folder: Path, described: Path | None = None) -> Iterator[RecipeMemory]:
    """Every YAML below `folder` that names a model.

    `described`: a config.json, or its folder, whose sizes count for every model. Raises `ConfigError` if there is no
    recipe, or if `described` names no sizes.
    """
    recipes = []
    for file in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        try:
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            is_recipe = isinstance(tree, dict) and "model" in tree
        except (yaml.YAMLError, UnicodeDecodeError):  # reading it as a recipe reports the error
            is_recipe = re.search(rb"^model:", file.read_bytes(), re.MULTILINE) is not None
        recipes += [file] if is_recipe else []
    if not recipes:
        raise ConfigError(f"--recipes {folder}: no recipe below it; a recipe is a YAML file with the key `model`")
    sizes: tuple[ModelShape, str] | None = None
    if described is not None:
        if (shape := described_shape(described)) is None:
            names = "it names its sizes otherwise than hidden_size, num_hidden_layers …"
            raise ConfigError(f"--config {described}: {names}")
        sizes = shape, str(described)
    yield from (_checked(file, str(file.relative_to(folder)), sizes) for file in recipes)


def _checked(file: Path, name: str, sizes: tuple[ModelShape, str] | None) -> RecipeMemory:
    """A recipe that cannot be read, or is not UTF-8, is one finding among the others'."""
    try:
        return _summed(file, name, load_config(file), sizes)
    except (ConfigError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        return RecipeMemory(name, Check(name, False, problem, "correct the key or file that is named"))


def _summed(file: Path, name: str, config: RunConfig, known: tuple[ModelShape, str] | None) -> RecipeMemory:
    shape, sizes = known or find_shape(config)
    gpus = declared_gpus(file)
    if gpus is None:
        why = "its first comment declares no GPU (`one GPU of 80 GB`); `penstock doctor RECIPE` asks this machine"
        return RecipeMemory(name, skipped(name, why), config.model, sizes)
    if shape is None:
        why = f"the sizes of {config.model} are not known here: name its config.json with --config"
        return RecipeMemory(name, skipped(name, why), config.model, sizes, gpus)
    return RecipeMemory(
        name, check_device(name, config, shape, gpus), config.model, sizes, gpus, busiest(config, shape, gpus)
    )
