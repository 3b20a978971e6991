"""Ranks of two machines, each started by a torchrun of its own: stages, experts and cut rows on either give what they
give on one.

Both machines are this one. All cases go through one pair of torchruns: importing takes longer than they do.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_runs import HERE, INSTALLED, PYTHON, Case, metrics, on_ranks, with_distinct_norms
from safetensors.torch import load_file
from tests.ports import free_port
from trainer_support import ENVIRONMENT

from penstock.deploy import Rendezvous
from penstock.trainer.engines.megatron.settings import SETUP_HINT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.megatron,
    pytest.mark.skipif(not INSTALLED, reason=f"no megatron-core and mbridge in {PYTHON}: {SETUP_HINT}"),
    pytest.mark.skipif(which("nvidia-smi") is not None, reason="CUDA is not forked, and its tests are test_on_gpus.py"),
]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
STEPS = {"steps": 3, "checkpoint_every": 2}
RUNS = {
    "replicas": ("dense", "dp2"),
    "stages": ("dense", "pp2"),
    "experts": ("mixture", "ep2"),
    "stages and experts": ("mixture", "pp2 ep2"),
    "split matrices on each, stages": ("dense", "tp2 pp2"),
}
"""Whole runs of the trainer: model, layout."""
LEARNED = {"cut rows": "cp2", "cut rows and experts": "cp2 ep2"}
"""Logprobs and gradients with layers of the test tree, which has no Transformer Engine."""
PUBLISHED = {"published stages": ("dense", "pp2"), "published experts": ("mixture", "ep2")}
"""Weights to a file from the ranks' shares, and exported; `rank.py` compares them with what rank 0 gathers."""


def on_two_machines(folder: Path, cases: Sequence[Case]) -> None:
    """As `penstock train --nnodes 2 --node-rank N` starts them; all cases have as many ranks."""
    for case in cases:
        case.folder.mkdir(parents=True)
    given = folder / "cases.json"
    given.write_text(json.dumps([case.as_json() for case in cases]))
    endpoint = f"127.0.0.1:{free_port()}"
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    halves = []
    for node in range(2):
        words = Rendezvous(2, node, endpoint).arguments(cases[0].ranks, "two-machines", folder)
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


def cases_in(folder: Path, models: dict[str, str], ranks: int) -> list[Case]:
    runs = [Case("run", folder / name, models[model], layout, STEPS) for name, (model, layout) in RUNS.items()]
    learned = [
        Case("replay_with_context_parallelism", folder / name, models["mixture"], layout)
        for name, layout in LEARNED.items()
    ]
    published = [
        Case("round_trip", folder / name, models[model], layout) for name, (model, layout) in PUBLISHED.items()
    ]
    return [case for case in (*runs, *learned, *published) if case.ranks == ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of what was computed on one machine, and on two."""
    top = tmp_path_factory.mktemp("machines")
    models = {
        "dense": with_distinct_norms(top / "dense", "Qwen3", tie_word_embeddings=False),
        "mixture": with_distinct_norms(top / "mixture", "Qwen3Moe", tie_word_embeddings=False, **EXPERTS),
    }
    one, two = top / "one", top / "two"
    on_ranks(one, [case for ranks in (2, 4) for case in cases_in(one, models, ranks)])
    for ranks in (2, 4):
        on_two_machines(two, cases_in(two, models, ranks))
    return one, two


def assert_same_bits(one: Path, two: Path) -> None:
    expected, given = load_file(one), load_file(two)
    assert expected.keys() == given.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_two_machines_is_that_on_one(name: str, found: tuple[Path, Path]) -> None:
    one, two = (folder / name for folder in found)
    numbers: list[list[tuple[Any, Any]]] = [
        [(line["loss"], line["grad_norm"]) for line in metrics(folder)] for folder in (one, two)
    ]
    assert len(numbers[0]) == STEPS["steps"]
    assert numbers[0] == numbers[1]
    model = Path("run") / "final_model" / "model.safetensors"
    assert_same_bits(one / model, two / model)


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_two_machines_are_those_of_one(name: str, found: tuple[Path, Path]) -> None:
    one, two = (folder / name for folder in found)
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert "gradients.safetensors" in files
    assert "logprobs_0.safetensors" in files
    for file in files:
        assert_same_bits(one / file, two / file)
    assert (one / "found.json").read_text() == (two / "found.json").read_text()


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_leave_two_machines_as_they_leave_one(name: str, found: tuple[Path, Path]) -> None:
    one, two = (folder / name for folder in found)
    assert_same_bits(one / "published.safetensors", two / "published.safetensors")
    (file,) = (two / "published").glob("*.safetensors")
    assert len(load_file(file)) == len(load_file(two / "published.safetensors"))
    exported = [sorted(path.name for path in (folder / "exported").glob("*")) for folder in (one, two)]
    assert exported[0] == exported[1]
    for shard in exported[0]:
        if shard.endswith(".safetensors"):
            assert_same_bits(one / "exported" / shard, two / "exported" / shard)
