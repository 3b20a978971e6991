"""LoRA adapters as versions of the weights, in peft's names, and their merge into a full version on a server.

    W' = W + s·B·A      A [r, in], B [out, r], W [out, in]; s = alpha / r, or alpha / √r with ``use_rslora``

W is a tensor of version 0, the model folder that trainer and servers start from (`ModelFolder`). Every adapter applies
to that base, never to the adapter before. Anything else than such a W (DoRA, biases, embeddings, whole modules) is
refused by name.

    merge   read and verify the adapter ─ compare the base's state ─ check that its tensors fit ─ then tensor by tensor:
            read from the folder, verify, add s·B·A in float32, round to the engine's dtype, checksum, write

Engines load the result like any full version, with any number of ranks. Its checksums are taken on this machine and not
announced: another machine may round the last bit of a sum differently.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.common import private_folder
from penstock.weight_sync.file_format import FULL, Section, describe, dtype_name, verify_tensor, write_file
from penstock.weight_sync.manifest import ChainFile, Manifest, TensorEntry, WeightsRefused, WeightsUnreachable, state_of
from penstock.weight_sync.reader import read_verified

NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MEANT = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")
# fmt: off
_MEANS_NOTHING_HERE = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying", "bias",
    "lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "qalora_group_size", "runtime_config",
    "megatron_config", "megatron_core",
}
"""How the adapter came about; or checked by itself (`_refuse_others`)."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave W as it is in the folder; "pissa" and the like change it."""
DEADLINE_S = 300.0


class BadAdapter(ValueError):
    """These are not tensors and settings of a LoRA adapter that can be merged; the message names which is not."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of peft's ``LoraConfig`` that the merged weights hang on, under its names."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    """W is [in, out]."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """r of the modules whose name ends with the key, a regular expression; likewise `alpha_pattern`."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_peft(cls, config: Mapping[str, Any]) -> AdapterConfig:
        """Of ``LoraConfig.to_dict()``, or what `as_dict` gave. Raises `BadAdapter` naming what is not supported."""
        _refuse_others(config)
        try:
            found = cls(**{name: config[name] for name in _MEANT if config.get(name) is not None})
            ranks = [found.r, *found.rank_pattern.values()]
            numbers = [*ranks, found.lora_alpha, *found.alpha_pattern.values()]
            _ = [re.compile(key) for key in (*found.rank_pattern, *found.alpha_pattern)]
        except (TypeError, AttributeError, re.error) as error:
            raise BadAdapter(f"the adapter's settings cannot be read: {error}") from error
        if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
            raise BadAdapter(f"a rank of the adapter is no positive integer: {ranks}")
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise BadAdapter(f"lora_alpha or a value of alpha_pattern is no number: {numbers}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a manifest."""
        return asdict(self)

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What B·A is multiplied by."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one tensor of the base."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float
    transposed: bool
    """The base's is [in, out]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tensor that it is for."""
        out, into = self.b.shape[0], self.a.shape[1]
        return (into, out) if self.transposed else (out, into)

    def add_to(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weight` with this added, in float32, rounded once to `dtype`. `weight` itself may be used up."""
        target = weight.float().t() if self.transposed else weight.float()
        total = target.addmm_(self.b.float(), self.a.float(), alpha=self.scale)
        return (total.t() if self.transposed else total).to(dtype).contiguous()


def changes_of(config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRank]:
    """By name of the base's tensor, what is added to it. Raises `BadAdapter` naming the adapter's tensor."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = NAME.fullmatch(name)
        if not found:
            raise BadAdapter(f"tensor {name!r} is neither lora_A nor lora_B of a linear layer, in peft's names")
        _check_tensor(name, found, tensor, config.rank(found["module"]))
        sides.setdefault(found["module"], {})[found["side"]] = tensor
    if not sides:
        raise BadAdapter("the adapter has no tensors")
    for module, pair in sides.items():
        if missing := {"A", "B"} - pair.keys():
            raise BadAdapter(f"tensor 'base_model.model.{module}.lora_{missing.pop()}.weight' is missing")
    return {
        f"{module}.weight": LowRank(pair["A"], pair["B"], config.scale(module), config.fan_in_fan_out)
        for module, pair in sides.items()
    }


def check_base(changes: Mapping[str, LowRank], base: Mapping[str, TensorEntry]) -> None:
    """Whether `base` (entries by name) is what can be changed so. Raises `BadAdapter` naming the base's tensor."""
    for name, change in changes.items():
        if name not in base:
            raise BadAdapter(f"the adapter changes tensor {name!r}, which the model folder does not have")
        entry = base[name]
        if entry.shape != change.shape:
            raise BadAdapter(
                f"the adapter is for a tensor {name!r} of shape {list(change.shape)},"
                f" the model's has {list(entry.shape)}"
            )
        if entry.dtype not in ("float32", "bfloat16", "float16"):
            raise BadAdapter(f"tensor {name!r} of the model is {entry.dtype}: adapters are merged into floats only")
        if twin := _twin(name, base):
            raise BadAdapter(f"the adapter changes tensor {name!r}, which is tied to {twin!r}")


def _twin(name: str, base: Mapping[str, TensorEntry]) -> str | None:
    """A head and an embedding of the same bytes are one parameter in the engine: one of them cannot change alone."""
    if name != "lm_head.weight":
        return None
    same = (other for other in base if other.endswith("embed_tokens.weight"))
    return next((other for other in same if base[other].xxh3 == base[name].xxh3), None)


def _check_tensor(name: str, found: re.Match[str], tensor: torch.Tensor, rank: int) -> None:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise BadAdapter(f"tensor {name!r} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, not a matrix of floats")
    has = tensor.shape[0 if found["side"] == "A" else 1]
    if has != rank:
        raise BadAdapter(f"tensor {name!r} has rank {has}, the adapter's settings say {rank}")


def _refuse_others(config: Mapping[str, Any]) -> None:
    if not isinstance(config, Mapping):
        raise BadAdapter(f"the adapter's settings are a {type(config).__name__}, not names and values")
    if config.get("peft_type", "LORA") != "LORA":
        raise BadAdapter(f"peft_type {config['peft_type']} is not supported: LORA is")
    if config.get("bias", "none") != "none":
        raise BadAdapter(f"bias={config['bias']!r} is not supported: only lora_A and lora_B travel")
    if (start := config.get("init_lora_weights")) not in _KEEPS_BASE:
        raise BadAdapter(f"init_lora_weights={start!r} is not supported: it changes the weights of version 0")
    for name in sorted(config.keys() - _MEANS_NOTHING_HERE - set(_MEANT)):
        if config[name]:
            raise BadAdapter(f"{name}={config[name]!r} is not supported: the adapter could not be merged by W + s·B·A")
    if missing := [name for name in ("r", "lora_alpha") if config.get(name) is None]:
        raise BadAdapter(f"the adapter's settings have no {missing[0]}")


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """As peft looks it up: the first key that is the module's name, or its end behind a dot."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


class ModelFolder:
    """Mapped, not held: what is read comes from the disk or its cache. One thread at a time calls it."""

    def __init__(self, folder: Path) -> None:
        """Raises `WeightsRefused` where the folder has no safetensors that could be read."""
        self.folder = Path(folder)
        self._files = _open(self.folder)
        self._entries: dict[str, TensorEntry] = {}

    def entries(self) -> dict[str, TensorEntry]:
        """A manifest's entry of each tensor, by name. The first call reads every byte; then it is remembered."""
        if not self._entries:
            self._entries = {name: describe(name, file.get_tensor(name)) for name, file in self._files.items()}
        return self._entries

    def state(self) -> str:
        """What the folder holds, as 16 hex digits; the same on all machines that have the same files."""
        return state_of(self.entries().values())

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor. Raises `WeightsRefused` where it is not what it was when all were read first."""
        tensor: torch.Tensor = self._files[name].get_tensor(name).clone()
        verify_tensor(0, self.entries()[name], tensor)
        return tensor


def _open(folder: Path) -> dict[str, Any]:
    """The open file of each tensor, by name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"the model folder's {path} cannot be read: {error}") from error
        files.update(dict.fromkeys(file.keys(), file))
    if not files:
        raise WeightsRefused(f"{folder} has no safetensors: adapters need the weights of version 0")
    return files


Changes = Mapping[str, LowRank]


class Merger:
    """Owns `directory`, which holds one merged version. One thread at a time merges; `close` may come from another."""

    def __init__(self, model: Path, directory: Path, dtype: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.directory = Path(directory)
        self._model, self._dtype, self._deadline_s = Path(model), getattr(torch, dtype), deadline_s
        self._base: ModelFolder | None = None
        self._adapter: Manifest | None = None
        self._merged: Manifest | None = None
        """The full version that `_adapter` was merged into."""
        self._busy = threading.Lock()
        self._closed = threading.Event()

    def merge(self, manifest: Manifest) -> Manifest:
        """The manifest of the full version. Raises `WeightsRefused` naming the tensor, `WeightsUnreachable` (no room).

        The file of the version before is deleted first: the engine has loaded it long ago.
        """
        with self._busy:
            if self._merged is None or manifest != self._adapter or not Path(self._merged.place).is_file():
                self._merged, self._adapter = self._merge(manifest), manifest
            return self._merged

    def close(self) -> None:
        """Break off what is under way and delete the files."""
        self._closed.set()
        with self._busy:
            self._forget()

    def _merge(self, manifest: Manifest) -> Manifest:
        assert manifest.adapter is not None
        give_up_at, version = time.monotonic() + self._deadline_s, manifest.version
        tensors = read_verified(manifest)
        base = self._base or ModelFolder(self._model)
        try:
            changes = changes_of(AdapterConfig.from_peft(manifest.adapter.config), tensors)
            _check_same_base(base, manifest.adapter.base)
            check_base(changes, base.entries())
        except (BadAdapter, KeyError, TypeError) as error:
            raise WeightsRefused(f"version {version}: {error}") from error
        self._base = base
        self._forget()
        try:
            return self._write(version, changes, base, give_up_at)
        except OSError as error:  # no room, most likely; there may be some later
            raise WeightsUnreachable(f"version {version}: not merged: {error}") from error

    def _write(self, version: int, changes: Changes, base: ModelFolder, give_up_at: float) -> Manifest:
        private_folder(self.directory)
        described: list[TensorEntry] = []

        def make(name: str) -> torch.Tensor:
            self._may_go_on(version, give_up_at)
            tensor = base.read(name)
            tensor = changes[name].add_to(tensor, self._dtype) if name in changes else tensor
            described.append(describe(name, tensor))
            return tensor

        sections = [
            Section.computed(name, self._dtype_of(entry, name in changes), entry.shape, partial(make, name))
            for name, entry in base.entries().items()
        ]
        path = self.directory / f"merged-{version:08d}.safetensors"
        written = write_file(path, sections, {"penstock": FULL}, durable=False)
        file = ChainFile(version, None, str(path), written.bytes, written.xxh3, state_of(described))
        return Manifest("shm", (file,), tuple(described))

    def _dtype_of(self, entry: TensorEntry, changed: bool) -> torch.dtype:
        """Only what is changed is rounded: a model may keep some tensors in another dtype than the engine's."""
        own: torch.dtype = getattr(torch, entry.dtype)
        return self._dtype if changed else own

    def _may_go_on(self, version: int, give_up_at: float) -> None:
        if self._closed.is_set():
            raise WeightsUnreachable(f"version {version}: not merged: this server stops")
        if time.monotonic() > give_up_at:
            raise WeightsUnreachable(f"version {version}: not merged in {self._deadline_s:g} s")

    def _forget(self) -> None:
        for path in (*self.directory.glob("merged-*"), *self.directory.glob(".merged-*.tmp")):
            path.unlink(missing_ok=True)


def _check_same_base(base: ModelFolder, expected: str) -> None:
    if (found := base.state()) != expected:
        raise BadAdapter(
            f"the adapter is for other weights of version 0 than {base.folder} has (state {found}, wanted {expected})"
        )
