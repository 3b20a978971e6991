"""Scores answers with reasoning-gym's own scorers. Standard library and that package only; see `reasoning_gym`.

    python reasoning_gym_process.py lines [FOLDER]    a line of JSON in, a line out; text is compared, nothing evaluated
    python reasoning_gym_process.py box [FOLDER]      one question on standard input; whatever scorer the task has

A question is ``{"task", "config", "number", "question", "answer"}``, answered ``{"score"}``, ``{"needs_box": true}``
if the task defines its own scorer (many of them evaluate the answer as Python), or ``{"error"}``.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any


def main() -> None:
    kind, folders = sys.argv[1], sys.argv[2:]
    sys.path[:0] = folders
    out, sys.stdout = sys.stdout, sys.stderr

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    for line in sys.stdin:
        question = json.loads(line)
        problems, entry, refused = load(question, in_box=kind == "box")
        if refused is not None:
            say(refused)
            continue
        if kind == "box":
            say({"loaded": True})  # what happens from here on is the answer's doing
        say(scored(problems, question["answer"], entry))


def load(question: dict[str, Any], *, in_box: bool) -> tuple[Any, Any, dict[str, Any] | None]:
    """The task's problems, the asked one, and why there is none."""
    try:
        problems, compares_text = problems_of(question["task"], question["config"])
        if not compares_text and not in_box:
            return None, None, {"needs_box": True}
        entry = problems[question["number"]]
    except Exception as error:  # noqa: BLE001 - it is the reward that fails, with these words
        return None, None, {"error": f"{type(error).__name__}: {error}"}
    if question["question"] and entry["question"] != question["question"]:
        words = "the problem is another one than the row's: rows were made with another version of reasoning-gym"
        return None, None, {"error": words}
    return problems, entry, None


def scored(problems: Any, answer: str, entry: Any) -> dict[str, Any]:
    """Scores an answer. An exception of the scorer is the answer's fault: a scorer takes any text."""
    try:
        return {"score": float(problems.score_answer(answer, entry))}
    except Exception as error:  # noqa: BLE001
        return {"score": 0.0, "raised": type(error).__name__}


@functools.lru_cache(maxsize=64)
def problems_of(task: str, config: str) -> tuple[Any, bool]:
    """The task's problems, and whether its scorer is the one that compares text."""
    import reasoning_gym
    from reasoning_gym.dataset import ProceduralDataset

    problems = reasoning_gym.create_dataset(task, **json.loads(config))
    return problems, type(problems).score_answer is ProceduralDataset.score_answer


if __name__ == "__main__":
    main()
