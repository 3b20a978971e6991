"""Ranks of two machines, each started by a torchrun of its own: stages on either give what two stages on one give."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from shutil import which

import pytest

torch = pytest.importorskip("torch")

from megatron_runs import HERE, INSTALLED, PYTHON, ROOT, Case, metrics, on_ranks, with_distinct_norms
from safetensors.torch import load_file

from penstock.deploy import Rendezvous
from penstock.trainer.engines.megatron import SETUP_HINT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.megatron,
    pytest.mark.skipif(not INSTALLED, reason=f"no megatron-core and mbridge in {PYTHON}: {SETUP_HINT}"),
    pytest.mark.skipif(which("nvidia-smi") is not None, reason="CUDA is not forked, and its tests are test_on_gpus.py"),
]


def on_two_machines(folder: Path, case: Case) -> None:
    """As `penstock train --nnodes 2 --node-rank N` starts them; here both are this machine."""
    case.folder.mkdir(parents=True)
    given = folder / "cases.json"
    given.write_text(json.dumps([case.as_json()]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    halves = []
    for node in range(2):
        words = Rendezvous(2, node, endpoint).arguments(case.ranks, "two-machines", folder)
        log = (folder / f"machine_{node}.log").open("w")
        command = [PYTHON, "-m", "torch.distributed.run", *words, str(HERE / "rank.py"), str(given)]
        halves.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        ended = [half.wait(570) for half in halves]
    finally:
        for half in halves:
            half.kill()
    failed = sorted(folder.glob("failed_*"), key=lambda path: path.stat().st_mtime_ns)
    logs = "".join((folder / f"machine_{node}.log").read_text()[-3000:] for node in range(2))
    assert ended == [0, 0], failed[0].read_text() if failed else logs


def test_stages_on_two_machines_train_as_on_one(tmp_path: Path) -> None:
    model = with_distinct_norms(tmp_path / "model", "Qwen3", tie_word_embeddings=False)
    settings = {"steps": 3, "checkpoint_every": 2}
    one = Case("run", tmp_path / "one" / "run", model, "pp2", settings)
    two = Case("run", tmp_path / "two" / "run", model, "pp2", settings)
    on_ranks(tmp_path / "one", [one])
    on_two_machines(tmp_path / "two", two)
    for here, there in zip(metrics(one.folder), metrics(two.folder), strict=True):
        assert here["loss"] == there["loss"]
        assert here["grad_norm"] == there["grad_norm"]
    files = [case.folder / "run" / "final_model" / "model.safetensors" for case in (one, two)]
    expected, found = map(load_file, files)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
