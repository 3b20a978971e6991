"""`penstock serve` as users start it, and programs with Tinker's SDK."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.until import until_in_threads

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
SDK = Path(os.environ.get("PENSTOCK_TINKER", ROOT / ".venv-tinker"))
NAME = "Base/Model"


@dataclass(frozen=True)
class Served:
    folder: Path
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]

    def start(self, program: str, *words: str) -> subprocess.Popen[str]:
        """A program of this folder, with the SDK."""
        return self.run(str(HERE / program), NAME, *words)

    def run(self, *words: str) -> subprocess.Popen[str]:
        """This Python, with the SDK."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *words], env=dict(self.environment), cwd=self.folder, **pipes)

    def result(self, program: subprocess.Popen[str]) -> Any:
        return json.loads(self.output(program))

    def output(self, program: subprocess.Popen[str]) -> str:
        output, errors = program.communicate(timeout=3000)
        assert program.returncode == 0, errors[-4000:] + (self.folder / "serve.log").read_text()
        return output

    def kill(self, what: str) -> None:
        """Kill the service's child whose command line has `what`; none may be there in the middle of a restart."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and what in (folder / "cmdline").read_text():
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:  # it has ended meanwhile
                continue


@contextmanager
def serving(folder: Path, model_name: str = NAME, *further: str) -> Iterator[Served]:
    folder.mkdir(exist_ok=True)
    port = free_port()
    settings = [f"runs_dir={folder}", "name=service", "trainer.lora.rank=32", "trainer.checkpoint_every=4"]
    settings += ["trainer.max_restarts=1000", *further]
    command = [
        sys.executable,
        "-m",
        "penstock.deploy.cli",
        "serve",
        str(ROOT / "recipes" / "calculator.yaml"),
        *settings,
    ]
    command += ["--port", str(port), "--model-name", model_name]
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        until_in_threads(lambda: "TINKER_BASE_URL" in log.read_text() or process.poll() is not None, 300)
        assert process.poll() is None, log.read_text()
        environment = {
            **os.environ,
            "PYTHONPATH": str(SDK),
            "PYTHONSAFEPATH": "1",
            "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
            "TINKER_API_KEY": (folder / "service" / "service" / "key").read_text().strip(),
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
        yield Served(folder, process, environment)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130, log.read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
