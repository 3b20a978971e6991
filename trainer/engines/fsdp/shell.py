"""A model without weights, of which each rank reads its own slices once it is sharded: no rank ever holds it whole.

    open_shell(model) ─► parameters on meta, buffers real ─► cut, sharded (`sharded`) ─► fill: each rank its slices

A parameter that the files have in another form is made from the tensors that this rank's part needs: of stacked
experts, those of its rows. Values are those of `from_pretrained`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from penstock.trainer.engines.fsdp.lora import LOW_RANK
from penstock.trainer.engines.fsdp.row_choice import first_sentence
from penstock.trainer.engines.fsdp.small_copy import NoCopy, small_copy
from penstock.trainer.engines.fsdp.tensor_files import TensorFiles, weight_files
from penstock.trainer.engines.fsdp.traits import Traits, find_traits
from penstock.trainer.job import BadJob
from penstock.trainer.ranks.distributed import Ranks
from penstock.weight_sync import HubNames, UnmappedTensors

WHOLE_BYTES = 2 << 30
"""Size below which the model itself is tried if a small copy is refused."""


class NeedsWholeModel(ValueError):
    """The model must be loaded whole on every rank; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelShell:
    """Parameters on meta until `fill`."""

    model: PreTrainedModel
    traits: Traits
    names: HubNames
    files: Sequence[Path]

    @torch.no_grad()
    def fill(self, owner: nn.Module, ranks: Ranks, device: torch.device) -> None:
        """A collective. `owner`: the sharded module that has `model`, or its body. Raises `BadJob` on all ranks where
        any of them reads a value that is not finite."""
        owner._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        # Rows of words that no text has may hold anything, unless they are the head's too.
        exempt = None if head is not None and head.weight is embedding else embedding
        bad: list[str] = []
        with TensorFiles(self.files) as files:
            for key, parameter in self.model.named_parameters():
                # Of a critic's body, the head that it has no use for.
                if parameter.is_meta or LOW_RANK.search(key):
                    continue
                name = key.replace(".base_layer.", ".")
                local, where = local_part(parameter)
                if local.numel():
                    self._read(files, name, where, local)
                    if parameter is not exempt and not _finite(local):
                        bad.append(name)
        self._refuse(ranks.gather(bad))

    def _read(self, files: TensorFiles, name: str, where: tuple[slice, ...], local: Tensor) -> None:
        parts = self.names.parts_of(name)
        if parts.renamed_only:
            files.read_into(parts.names[0], where, local)
        elif experts := self.names.experts(name):
            for place, row in enumerate(experts[where[0]]):
                stored = {one: files.read(one) for one in row}
                local[place].copy_(self.names.join(name, stored)[0][where[1:]])
        else:
            local.copy_(self.names.join(name, {one: files.read(one) for one in parts.names})[where])

    def _refuse(self, bad: list[list[str]]) -> None:
        bad_names = {name for of_rank in bad for name in of_rank}
        if bad_names:
            first = next((name for name in self.names.parts if name in bad_names), min(bad_names))
            rest = f" and {len(bad_names) - 1} more parameters" if len(bad_names) > 1 else ""
            raise BadJob(
                f"{type(self.model).__name__} cannot be trained: its weights hold NaN or infinite values, first in "
                f"{first}{rest}; take a copy of the model without them"
            )


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """(this rank's part, its place in the whole)"""
    if not isinstance(parameter, DTensor):
        return parameter.data, tuple(slice(0, size) for size in parameter.shape)
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    local = parameter.to_local()
    assert tuple(local.shape) == tuple(sizes) or not local.numel()
    return local, tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _finite(local: Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in local.reshape(-1).split(1 << 20))


def open_shell(model: str) -> ModelShell:
    """`model`: a folder or a name on the hub. Raises `NeedsWholeModel`, and `BadJob` for a model that cannot be trained
    or whose files lack tensors or have others."""
    try:
        config = AutoConfig.from_pretrained(model)
        folder = folder_of(model)
    except (ValueError, KeyError, OSError) as error:
        raise NeedsWholeModel(first_sentence(error)) from error
    files = weight_files(folder)
    if not files:
        raise NeedsWholeModel("it has no safetensors")
    if getattr(config, "quantization_config", None):
        raise NeedsWholeModel("its weights are quantised")
    try:
        traits = find_traits(small_copy(config))
    except NoCopy as error:
        raise NeedsWholeModel(str(error)) from error
    except BadJob as error:
        if sum(file.stat().st_size for file in files) <= WHOLE_BYTES:
            raise NeedsWholeModel(f"a copy of it is refused: {error}") from error
        raise
    try:
        with torch.device("meta"):
            shell: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # a model's own code may raise anything
        raise NeedsWholeModel(f"it cannot be made without weights: {first_sentence(error)}") from error
    if (folder / "generation_config.json").is_file():
        shell.generation_config = GenerationConfig.from_pretrained(model)
    with TensorFiles(files) as stored:
        names = _mapped(shell, model, stored)
        _make_buffers(shell, names, stored)
    traits.rows.apply(shell)
    return ModelShell(shell, traits, names, files)


def folder_of(model: str) -> Path:
    """Downloads what the hub's cache lacks. Raises `OSError`, `ValueError`."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))


def _mapped(shell: PreTrainedModel, model: str, stored: TensorFiles) -> HubNames:
    """Raises `BadJob` for names or shapes that differ, `NeedsWholeModel` where transformers decides by values."""
    try:
        names = HubNames.of(shell, stored.shapes)
        check_names(names, model)
        names.check(shell.state_dict(), stored.shapes)
    except UnmappedTensors as error:
        raise BadJob(f"{model}: {error}") from error
    if names.ignored:
        raise NeedsWholeModel(f"its files lack {min(names.ignored)}, which the model initialises by itself")
    if names.tied_twice:
        raise NeedsWholeModel(f"its files have {min(names.tied_twice)} although it is tied")
    return names


def check_names(names: HubNames, model: str) -> None:
    """Raises `BadJob` for tensors that the files lack, or that belong to no parameter."""
    for tensors, problem, fix in (
        (names.missing, "lack", "they would be random; download the model again"),
        (names.unexpected, "have", "which belong to no parameter of the model; is config.json another model's?"),
    ):
        if tensors:
            listed = ", ".join(sorted(tensors)[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
            raise BadJob(f"{model}: its files {problem} {listed}: {fix}")


@torch.no_grad()
def _make_buffers(shell: PreTrainedModel, names: HubNames, stored: TensorFiles) -> None:
    """Fill the buffers in place: from the files if these have them, otherwise as the model computes them (rotary
    frequencies)."""
    computed = {name for name, _ in shell.named_non_persistent_buffers()}
    for name, buffer in list(shell.named_buffers()):
        value = torch.empty_like(buffer, device="cpu")
        if name not in computed:
            parts = names.parts_of(name)
            value.copy_(names.join(name, {one: stored.read(one) for one in parts.names}))
            value._is_hf_initialized = True  # type: ignore[attr-defined]
        owner, _, key = name.rpartition(".")
        shell.get_submodule(owner)._buffers[key] = value
    for parameter in shell.parameters():
        parameter._is_hf_initialized = True
    shell.initialize_weights()


def names_of(loaded: PreTrainedModel, model: str) -> HubNames:
    """Return the names for a model that was loaded whole. Raises `BadJob` as `open_shell` does."""
    try:
        files = weight_files(folder_of(model))
        plain = files and not getattr(loaded.config, "quantization_config", None)
        with TensorFiles(files if plain else ()) as stored:
            names = HubNames.of(loaded, stored.shapes if plain else None)
        if plain:
            check_names(names, model)
        names.check(loaded.state_dict())
    except (UnmappedTensors, OSError) as error:
        raise BadJob(f"{model}: {error}") from error
    return names
