"""Stacks of a run's processes, sampled by py-spy, and the parts of Penstock that they are in."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.support.comparison import say

RATE = 100
"""Looks per second at each process."""
STOP_S = 30.0

_HTTP = r"/(aiohttp|uvicorn|starlette|fastapi|h11|httptools|http)/|common/http"
_EVERYWHERE = (
    ("http", _HTTP),
    ("queue", r"transfer_queue/|/redis/|hiredis"),
    ("json", r"/json/|orjson|pydantic"),
    ("imports", r"<frozen importlib"),
    ("garbage collection", r"\bgc\b"),
)
PARTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "engine": (
        ("weights", r"\(.*(weight_sync/|hf_batch.py.*swap)|^(swap|load_weights)\b"),
        ("sampling", r"hf_sampling\.py|^_sample |vllm/v1/sample/"),
        ("attention", r"hf_attention\.py|attention"),
        ("model", r"/models/.*/modeling_|/torch/nn/|vllm/model_executor/"),
        ("batching", r"hf_(batch|cache|passes)\.py|gpu_model_runner|vllm/v1/worker/block_table|vllm/v1/utils"),
        ("scheduling", r"vllm/v1/core/|vllm/v1/engine/core"),
        ("answers", r"hf_server\.py|vllm/entrypoints/|vllm/renderers/|vllm/v1/engine/"),
    ),
    "sidecar": (
        ("weights", r"weight_sync/|updater"),
        ("engine link", r"rollout_server/engines/"),
        ("requests", r"rollout_server/(request_queue|routes|protocol)"),
    ),
    "agent workers": (
        ("template", r"jinja2|chat_template|rendering|templates?\.py|/chat\.py"),
        ("tokenizer", r"tokeniz"),
        ("boxes", r"penstock/sandbox/|/sandbox/|subprocess\.py"),
        ("tools", r"/tools/"),
        ("model client", r"rollout_server/|/gateway/|llm"),
        ("rewards", r"agent_loops/rewards/"),
        ("episodes", r"penstock/agent_loops/"),
    ),
    "trainer": (
        ("publish", r"publish\.py|weight_sync/"),
        ("checkpoint", r"checkpoint|saver\.py|/torch/distributed/checkpoint"),
        ("optimizer", r"/torch/optim/|clip_grad"),
        ("backward", r"^(backward|_engine_run_backward)\b"),
        ("forward", r"/models/.*/modeling_|fsdp/(models|attention|context)\.py|logprobs\.py"),
        ("loss and advantages", r"trainer/(losses|advantages|corrections|loss|credit)"),
        ("metrics", r"metrics\.py|recorder\.py|sinks|tensorboard|matplotlib"),
        ("batch", r"trainer/(batch|packing|source|data|grouping)"),
    ),
    "supervisor": (("status", r"status|rich/|progress"), ("plots", r"matplotlib")),
}
"""Process → (part, pattern). A stack is searched from its innermost frame outwards; the first pattern that fits any
frame, in this order per frame, names its part."""
LOOP = re.compile(r"^(Runner\.run|BaseEventLoop\._run_once|Handle\._run|run \(.*uvloop) ?")
EVENT_LOOP = "event loop"
"""The loop's own code, with uvloop reading and writing of sockets too; on a busy machine some of its waiting."""
REST = "rest"
WAITING = re.compile(r"^(EpollSelector\.select|Condition\.wait|.*_do_waitpid|\s*)( |$)")
"""Innermost frames of threads that wait; on a busy machine some are taken for running."""


class StackProfile:
    """One py-spy per process, from `attach` to the end of that process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []

    def attach(self, processes: Mapping[int, str]) -> None:
        """Process id → name. Where py-spy is missing or the kernel forbids it, says so and profiles nothing."""
        program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
        if program is None:
            say("step: py-spy is not installed (pip install py-spy): only processes are accounted for, not their parts")
            return
        for pid, name in processes.items():
            file = self._folder / f"stacks-{pid}"
            words = ["record", "--pid", str(pid), "--format", "raw", "--full-filenames", "--nonblocking"]
            with (self._folder / "py-spy.log").open("ab") as log:
                process = subprocess.Popen(
                    [program, *words, "--rate", str(RATE), "--output", str(file)], stdout=log, stderr=log
                )
            self._running.append((name, file, process))

    def close(self) -> None:
        """Each ends with its process; one that does not is interrupted."""
        for _, _, process in self._running:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait(STOP_S)

    def stacks(self, name: str) -> Counter[str]:
        """Stack (frames from the outermost inwards, separated by ";") → how often it was seen in such processes."""
        found: Counter[str] = Counter()
        for kind, file, _ in self._running:
            lines = file.read_text(errors="replace").splitlines() if kind == name and file.exists() else []
            for line in lines:
                stack, _, count = line.rpartition(" ")
                if not WAITING.match(stack.rpartition(";")[2]):
                    found[stack] += int(count)
        return found


def parts_of(name: str, stacks: Mapping[str, int]) -> dict[str, float]:
    """Part → share of the samples; empty where there is none."""
    patterns = [(part, re.compile(pattern)) for part, pattern in (*PARTS.get(name, ()), *_EVERYWHERE)]
    found: Counter[str] = Counter()
    for stack, count in stacks.items():
        found[_part(stack.split(";"), patterns)] += count
    total = found.total()
    return {part: count / total for part, count in found.items()} if total else {}


def _part(frames: list[str], patterns: list[tuple[str, re.Pattern[str]]]) -> str:
    if LOOP.match(frames[-1]):
        return EVENT_LOOP
    for frame in reversed(frames):
        for part, pattern in patterns:
            if pattern.search(frame):
                return part
    return REST
