"""The core and `--help` load no torch: agent workers and tools run where no model lives."""

import subprocess
import sys

import pytest
from tests.deploy.conftest import RECIPE

CHECKS = f"""
from pathlib import Path
from penstock.deploy import load_config
from penstock.deploy.preflight.suite import run_checks
config = load_config(Path({str(RECIPE)!r}), ['trainer.loss=kl_cov', 'trainer.filter=pf_ppo'])
names = {{check.name for check in run_checks(config)}}
assert {{'algorithm', 'trainer.engine', 'trainer settings'}} <= names, names
"""
HELP = """
from typer.testing import CliRunner
from penstock.deploy.cli import app
assert CliRunner().invoke(app, ['--help']).exit_code == CliRunner().invoke(app, ['run', '--help']).exit_code == 0
"""
TRAINER = """
import penstock.deploy.cli, penstock.deploy.run.roles, penstock.trainer.engines.fsdp.engine
from penstock.trainer import train
"""
MODELS = "torch safetensors vllm"


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import penstock.deploy.cli", f"{MODELS} redis aiohttp fastapi pyarrow"),
        (HELP, f"{MODELS} redis"),
        ("import penstock.agent_loops.worker, penstock.tools.registry, penstock.sandbox.make", MODELS),
        ("import penstock.transfer_queue.redis.queue, penstock.rollout_server.client.client", MODELS),
        ("import penstock.rollout_server.server.process", MODELS),
        pytest.param(CHECKS, "torch aiohttp.web matplotlib", id="checks of a run, in the process that supervises it"),
        pytest.param(TRAINER, "peft matplotlib aiohttp fastapi pyarrow", marks=pytest.mark.torch, id="trainer"),
    ],
)
def test_a_process_loads_only_what_it_needs(code: str, forbidden: str) -> None:
    probe = f"{code}\nimport sys\nsys.exit(' '.join(m for m in {forbidden!r}.split() if m in sys.modules) or None)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
