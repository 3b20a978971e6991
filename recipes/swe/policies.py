"""Policies without a model: one knows the answer, one does nothing. They prove an environment, not an agent.

`oracle` applies the reference patch the way an agent would, through `editor` if possible and `shell` otherwise;
`null` looks around and submits. Both talk through the real loop, tools, boxes and grading:

penstock rehearse recipes/swe/cpu.yaml --policy recipes/swe/policies.py:oracle --expect 1
penstock rehearse recipes/swe/cpu.yaml --policy recipes/swe/policies.py:null --expect 0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.testing import EpisodeState


def call(name: str, **arguments: Any) -> str:
    """A call as Hermes' models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def oracle(state: EpisodeState) -> str:
    return repair(state.task.extra_info)[state.turn]


def null(state: EpisodeState) -> str:
    return NOTHING[state.turn]


def repair(task: Mapping[str, Any]) -> list[str]:
    """Answers of an agent that knows `task["patch"]`."""
    edits = edits_of(task["patch"])
    if edits is None:
        changes = [
            call("shell", command=f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{task['patch']}END_OF_PATCH")
        ]
    else:
        changes = [call("editor", command="view", path=edits[0]["path"])]
        changes += [call("editor", command="replace", **edit) for edit in edits]
    return [*changes, call("shell", command="git diff --stat"), call("submit")]


NOTHING = [call("shell", command="git log --oneline; git status --short"), call("submit")]


def edits_of(patch: str) -> list[dict[str, str]] | None:
    """Each hunk as path, old_text and text for `editor replace`; None if it makes, removes or renames files, or is
    binary."""
    if (
        re.search(r"^(new file|deleted file|rename|GIT binary|old mode)", patch, re.MULTILINE)
        or "\\ No newline" in patch
    ):
        return None
    edits = []
    for part in re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        match = re.search(r"^--- a/(.+)\n\+\+\+ b/(.+)\n", part, re.MULTILINE)
        if match is None or match[1] != match[2]:
            return None
        hunks = re.split(r"^@@ .*\n", part[match.end() :], flags=re.MULTILINE)[1:]
        edits += [{"path": match[2], **_sides(hunk)} for hunk in hunks]
    return edits or None


def _sides(hunk: str) -> dict[str, str]:
    lines = hunk.splitlines(keepends=True)
    return {
        "old_text": "".join(line[1:] for line in lines if line[0] in " -"),
        "text": "".join(line[1:] for line in lines if line[0] in " +"),
    }
