"""Answers to problems of reasoning-gym (`data.train: reasoning_gym:TASK`), scored by the package's own scorers.

A third of its tasks compare text: a process of the worker's scores them. The others have scorers of their own, of which
many give the answer to `eval`, or to sympy's parser, which does: the answer is then untrusted code, and is scored in a
fresh box (about two seconds of CPU, most of it the import). Code that forges its own score looks like a right
answer there; it reaches no other answer's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.rewards.base import THINKING, Answer, BaseReward, Value
from penstock.agent_loops.rewards.maths import LineProcesses, ProcessEnded
from penstock.sandbox import RunResult, Sandbox

PROGRAM = Path(__file__).with_name("reasoning_gym_process.py")
MODULE = "penstock.agent_loops.rewards.reasoning_gym_process"
ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
MAX_ANSWER_CHARS = 100_000


class ReasoningGym(BaseReward):
    """The package's score of the last ``<answer>``, else of the whole text; metric `raised`: its scorer raised."""

    journaled = True

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        path: str = "",
        box_path: str = "",
        processes: int = 2,
        timeout_s: float = 60.0,
        needs_tag: bool = False,
    ) -> None:
        """
        Args:
            path: folder with the package, for this worker's Python; empty: it is installed.
            box_path: the same as boxes see it (`sandbox.folders`), for their python3; empty: it is installed there.
            processes: of this worker, which compare text; each holds about 120 MB.
            timeout_s: of one answer.
            needs_tag: an answer without ``<answer>`` is wrong.
        """
        super().__init__(sandbox)
        self._box_path, self._timeout_s, self._needs_tag = box_path, timeout_s, needs_tag
        folders = (str(Path(path).absolute()),) if path else ()
        self._processes = LineProcesses(MODULE, ("lines", *folders), processes)
        self._boxed: set[str] = set()
        """Tasks with a scorer of their own."""

    async def score(self, answer: Answer) -> Value:
        """Raises `InfraFailure`, `SandboxError`."""
        text = self._answer(answer)
        if text is None:
            return {"score": 0.0, "raised": 0}
        row = answer.extra_info
        try:
            name, config, number = str(row["task"]), str(row["config"]), int(row["number"])
        except (KeyError, ValueError, TypeError) as error:
            reason = f"reasoning_gym: the row has no task, config and number ({error!r})"
            raise InfraFailure("reward", reason) from error
        prompt = answer.messages[-1]["content"] if answer.messages else ""
        question = {"task": name, "config": config, "number": number, "question": prompt, "answer": text}
        verdict = {"needs_box": True}
        if name not in self._boxed:
            try:
                verdict = await self._processes.ask(question, self._timeout_s)
            except ProcessEnded as error:
                raise InfraFailure("reward", f"reasoning_gym: {error}; is reasoning-gym installed?") from error
        if verdict.get("needs_box"):
            self._boxed.add(name)
            verdict = await self._in_box(question)
        if "error" in verdict:
            raise InfraFailure("reward", f"reasoning_gym: {name}: {verdict['error']}")
        return {"score": float(verdict["score"]), "raised": int("raised" in verdict)}

    async def close(self) -> None:
        await self._processes.close()

    def _answer(self, answer: Answer) -> str | None:
        text = THINKING.sub("", answer.extra_info.get("final_text") or answer.solution)
        tagged = ANSWER.findall(text)
        if not tagged and self._needs_tag:
            return None
        return str(tagged[-1] if tagged else text).strip()[:MAX_ANSWER_CHARS]

    async def _in_box(self, question: dict[str, Any]) -> dict[str, Any]:
        """A box per answer. One that its code ends, or does not end, is a wrong answer."""
        if self.sandbox is None:
            raise InfraFailure(
                "reward", f"reasoning_gym: {question['task']} may evaluate answers as code: it needs a sandbox"
            )
        session = await self.sandbox.start(f"reward reasoning_gym/{question['task']}")
        try:
            await session.write_file("score.py", PROGRAM.read_bytes())
            folders = [self._box_path] if self._box_path else []
            command = ["python3", "-I", "score.py", "box", *folders]
            result = await session.run(command, stdin=json.dumps(question) + "\n", timeout_s=self._timeout_s)
        finally:
            await session.close()
        return _verdict(result)


def _verdict(result: RunResult) -> dict[str, Any]:
    """Reads the verdict of a box. A failure is the box's until the problem is loaded, then the answer's."""
    first, _, rest = result.stdout.partition("\n")
    if '"error"' in first:
        return dict(json.loads(first))
    if '"loaded"' not in first:
        ended = f"limit {result.limit}" if result.limit else f"exit status {result.exit_code}"
        return {"error": f"its box ended before the answer was read: {ended} {result.stderr[-400:]}"}
    try:
        verdict = json.loads(rest.partition("\n")[0])
        return {**verdict, "score": min(1.0, max(0.0, float(verdict["score"])))}
    except (ValueError, KeyError, TypeError):
        return {"score": 0.0, "raised": result.limit or "ended"}
