"""What a graded episode did to its repository, as a file; `penstock data export` makes SWE-bench's format of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import xxhash

from penstock.common import write_atomically
from penstock.tools.base import ToolInfraError

DESCRIPTION = "Folder for each graded episode's patch, which `penstock data export` writes as SWE-bench's predictions."


def keep_prediction(folder: Path, episode: str, instance_id: str, patch: bytes) -> None:
    """A file per episode: one that is graded again replaces it. Raises `ToolInfraError` where it cannot be written."""
    name = re.sub(r"[^A-Za-z0-9_.#-]", ".", episode).lstrip(".") or "episode"
    name += f"-{xxhash.xxh3_64_hexdigest(episode.encode())[:8]}"  # a/b and a.b are two episodes
    line = {"instance_id": instance_id, "model_patch": patch.decode("utf-8", "replace"), "episode": episode}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{name}.json", json.dumps(line) + "\n")
    except OSError as error:
        raise ToolInfraError("predictions", f"{folder}: {error}") from error
