"""Run by the Python of SGLang: in_sglang.py FOLDER … prints a line of JSON for each, {"folder", "found"}.

Whether SGLang has a model of its own for the folder's architecture. Nothing is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang.srt.models.registry import ModelRegistry


def main(folders: list[str]) -> None:
    known = ModelRegistry.get_supported_archs()
    for folder in folders:
        (architecture,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        found = "has the model" if architecture in known else f"refused: no {architecture}"
        print(json.dumps({"folder": folder, "found": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
