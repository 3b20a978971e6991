"""The core and `--help` load no torch: agent workers and tools run where no model lives."""

import subprocess
import sys

import pytest
from tests.deploy.conftest import RECIPE

FORBIDDEN = "torch safetensors vllm"


@pytest.mark.parametrize(
    "code",
    [
        "import penstock.deploy.cli",
        "from typer.testing import CliRunner; from penstock.deploy.cli import app;"
        " assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        " assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0",
        "import penstock.agent_loops.worker, penstock.tools.registry, penstock.sandbox.make",
        "import penstock.transfer_queue.redis.queue, penstock.rollout_server.client.client",
        "import penstock.rollout_server.server.process",
    ],
)
def test_no_torch(code: str) -> None:
    probe = f"import sys; {code}; sys.exit(' '.join(m for m in {FORBIDDEN!r}.split() if m in sys.modules) or None)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_checks_of_a_run_load_no_torch() -> None:
    """`penstock run` checks algorithms by name and settings in the process that then supervises the run."""
    code = (
        "from pathlib import Path\n"
        "from penstock.deploy import load_config\n"
        "from penstock.deploy.preflight.suite import run_checks\n"
        f"config = load_config(Path({str(RECIPE)!r}), ['trainer.loss=kl_cov', 'trainer.filter=pf_ppo'])\n"
        "names = [check.name for check in run_checks(config)]\n"
        "assert {'trainer.advantage', 'trainer.engine', 'trainer settings'} <= set(names), names\n"
        "import sys; loaded = [name for name in ('torch', 'aiohttp.web', 'matplotlib') if name in sys.modules]\n"
        "sys.exit(' '.join(loaded) or None)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.torch
def test_the_trainer_loads_what_its_settings_ask_for() -> None:
    optional = "peft matplotlib aiohttp fastapi pyarrow"
    code = (
        "import sys, penstock.deploy.cli, penstock.deploy.run.roles; from penstock.trainer import train;"
        "import penstock.trainer.engines.fsdp.engine;"
        f" sys.exit(' '.join(m for m in {optional!r}.split() if m in sys.modules) or None)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
