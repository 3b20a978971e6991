"""Reads SGLang's request and response types, and its names for memory, out of its source, without importing it.

cd tests/rollout_server/engines/sglang && python sglang_types.py SITE_PACKAGES > sglang_types.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

FILES = ("srt/managers/io_struct.py", "srt/sampling/sampling_params.py")
TYPES = (
    "GenerateReqInput",
    "SamplingParams",
    "AbortReq",
    "PauseGenerationReqInput",
    "ContinueGenerationReqInput",
    "UpdateWeightFromDiskReqInput",
    "UpdateWeightFromDiskReqOutput",
    "CheckWeightsReqInput",
    "CheckWeightsReqOutput",
    "ChecksumInfo",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
    "LoadLoRAAdapterReqInput",
    "UnloadLoRAAdapterReqInput",
)
TAGS = "GPU_MEMORY_TYPE_"
"""Constants whose values name what can be released."""


def read_types(site_packages: Path) -> dict[str, dict[str, str]]:
    """Annotation of every field, by type and field; inherited ones too."""
    classes: dict[str, ast.ClassDef] = {}
    for name in FILES:
        tree = ast.parse((site_packages / "sglang" / name).read_text())
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name: _fields(name, classes) for name in TYPES} | {TAGS: _tags(site_packages)}


def _tags(site_packages: Path) -> dict[str, str]:
    """Value of each constant."""
    tree = ast.parse((site_packages / "sglang" / "srt" / "constants.py").read_text())
    found = [(ast.unparse(node.targets[0]), node.value) for node in tree.body if isinstance(node, ast.Assign)]
    return {
        name: str(value.value) for name, value in found if name.startswith(TAGS) and isinstance(value, ast.Constant)
    }


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    if name not in classes:
        return {}
    found: dict[str, str] = {}
    for base in classes[name].bases:
        found |= _fields(ast.unparse(base), classes)
    own = [node for node in classes[name].body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return found | {ast.unparse(node.target): ast.unparse(node.annotation) for node in own}


if __name__ == "__main__":
    print(json.dumps(read_types(Path(sys.argv[1])), indent=1))
