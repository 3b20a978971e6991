"""A Hugging Face folder written a file at a time: no more than one file's tensors are on the host."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.engines.fsdp.tensor_files import INDEX, WEIGHTS


def save_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path, file_bytes: int = 4 << 30) -> None:
    """Save tensors under transformers' names of files: one, or numbered ones of about `file_bytes` with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[tuple[Path, list[str]]] = []
    total = size = 0
    pending: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > file_bytes:
            written.append(_write(folder, len(written), pending))
            pending, size = {}, 0
        pending[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    written.append(_write(folder, len(written), pending))
    if len(written) == 1:
        written[0][0].rename(folder / WEIGHTS)
        return
    files: dict[str, str] = {}
    for number, (path, names) in enumerate(written, start=1):
        final = path.with_name(f"model-{number:05d}-of-{len(written):05d}.safetensors")
        path.rename(final)
        files |= dict.fromkeys(names, final.name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _write(folder: Path, number: int, tensors: dict[str, Tensor]) -> tuple[Path, list[str]]:
    path = folder / f"unnumbered-{number:05d}.safetensors"
    save_shared(tensors, path, {"format": "pt"})
    return path, list(tensors)


def save_shared(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Save a file that others may read as the umask says; safetensors' own is for its owner alone."""
    from safetensors.torch import save_file

    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def save_settings(model: PreTrainedModel, folder: Path) -> None:
    """Write the files of a Hugging Face folder other than weights and tokenizer."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
