"""`penstock eval` as a person starts it: a recipe, checkpoints of a run, killed and started again, a served model."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE
from tests.deploy.living_command import LivingCommand, commands, lines
from tests.deploy.sft_data import MODEL, traces, write_messages

pytest.importorskip("torch")

from penstock.datasets import write_gsm8k_equations
from penstock.deploy import ConfigError
from penstock.deploy.evaluation.target import EvalRequest, resolve_target

pytestmark = [pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(1200)]
ENOUGH = "sandbox.run_timeout_s=100"
"""A busy machine must not be taken for code that never ends."""
ROWS = 36
"""Times 4 samples: three parts."""
GSM8K = os.environ.get("PENSTOCK_GSM8K", "")
Start = Callable[..., LivingCommand]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with commands(tmp_path) as begin:
        yield begin


@pytest.mark.slow
@pytest.mark.crash
def test_killed_and_started_again_it_repeats_nothing(tmp_path: Path, start: Start) -> None:
    """Three parts of episodes; everything is killed when the first one is recorded."""
    words = ("eval", str(RECIPE), "--rows", str(ROWS), "--n", "4", "--name", "mine", "--json", ENOUGH)
    first, root = start(*words), tmp_path / "runs" / "mine"
    recorded = root / "episodes.jsonl"
    first.wait_for(lambda: recorded.exists() and recorded.read_text().count("\n") >= 64)
    first.kill()
    before = recorded.read_text()
    assert before.count("\n") < 4 * ROWS, "it was not killed in its middle"

    report = json.loads(start(*words).finish())
    assert recorded.read_text().startswith(before)
    done = Counter((line["row"], line["sample"]) for line in lines(recorded))
    assert done == Counter({(row, sample): 1 for row in range(ROWS) for sample in range(4)})
    shown = [line["episode_id"] for file in (root / "trajectories").iterdir() for line in lines(file)]
    assert len(shown) == len(set(shown)) == 4 * ROWS
    figures = report["sources"]["calculator"]
    assert (figures["tasks"], figures["episodes"], figures["missing"]) == (ROWS, 4 * ROWS, 0)
    rewards = [line["reward"] for line in lines(recorded)]
    assert figures["avg@4"]["value"] == pytest.approx(sum(rewards) / len(rewards))
    assert figures["avg@4"]["low"] < figures["avg@4"]["value"] < figures["avg@4"]["high"]
    assert figures["pass@1"]["value"] < figures["pass@2"]["value"] < figures["pass@4"]["value"]
    assert json.loads((root / "eval.json").read_text()) == report

    logs = {file: file.stat().st_mtime_ns for file in (root / "logs").glob("*.log")}
    assert json.loads(start(*words).finish()) == report, "nothing is left to do: the figures alone"
    assert logs == {file: file.stat().st_mtime_ns for file in (root / "logs").glob("*.log")}
    other = start("eval", str(RECIPE), "agent.max_turns=3", "--rows", str(ROWS), "--n", "2", "--name", "mine")
    other.finish(status=2)
    assert "other settings (agent.max_turns, samples)" in other.log.read_text()


@pytest.mark.deep
def test_checkpoints_of_a_run_and_what_was_learned(tmp_path: Path, start: Start) -> None:
    """Fine-tuned on traces that call the tool: greedy, the base model is right less often than its successor."""
    file = write_messages(tmp_path / "m.jsonl", traces(256))
    given = (f"sft.messages={file}", "sft.steps=40", "sft.lr=5e-4", "trainer.checkpoint_every=13", "trainer.sinks=[]")
    start("sft", str(RECIPE), "name=taught", *given).finish()
    run = tmp_path / "runs" / "taught"
    common = ("--rows", "32", "--n", "1", "--json", ENOUGH)
    taught = json.loads(start("eval", str(run), *common).finish())
    assert taught["model"] == str(run / "final_model")
    early = json.loads(start("eval", str(run), "--checkpoint", "39", *common).finish())
    assert early["model"].endswith("taught, step 39")
    assert (tmp_path / "runs" / "taught-eval-step39" / "model" / "model.safetensors").exists()
    values = [one["sources"]["calculator"]["avg@1"]["value"] for one in (taught, early)]
    assert min(values) >= 0.9


@pytest.mark.deep
def test_a_served_model(tmp_path: Path, start: Start) -> None:
    """A rollout server of another evaluation serves it; its answers come with ids, and nothing is loaded."""
    base = ("eval", str(RECIPE), ENOUGH)
    serving = start(*base, "--rows", "128", "--n", "16", "--name", "serving")
    log, env = tmp_path / "runs/serving/logs/rollout-0.log", tmp_path / "runs/serving/connect.env"
    serving.wait_for(lambda: log.exists() and "rollout server rollout-0 at" in log.read_text())
    url = re.search(r"rollout-0 at (\S+)", log.read_text())
    token = re.search(r"PENSTOCK_TOKEN=(\S+)", env.read_text())
    assert url is not None
    assert token is not None
    words = (*base, "--url", url[1], "--rows", "4", "--n", "2", "--name", "asking", "--json")
    asking = start(*words, PENSTOCK_SERVED_KEY=token[1])
    report = json.loads(asking.finish())
    assert report["model"] == f"what {url[1]} serves"
    assert report["sources"]["calculator"]["episodes"] == 8
    serving.process.send_signal(signal.SIGTERM)
    serving.process.wait(120)
    assert serving.process.returncode == 130


@pytest.mark.deep
def test_gsm8k_equations_beside_generated_problems(
    tmp_path: Path, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two sources in one evaluation; GSM8K's own rows where PENSTOCK_GSM8K names its folder."""
    source = Path(GSM8K or tmp_path_factory.mktemp("gsm8k"))
    if not GSM8K:
        for split in ("train", "test"):
            steps = " ".join(f"<<{n}*{n + 1}={n * (n + 1)}>>" for n in range(20, 36))
            (source / f"{split}.jsonl").write_text(json.dumps({"question": "?", "answer": steps}) + "\n")
    write_gsm8k_equations(source, tmp_path / "gsm8k")
    data = ("--data", str(tmp_path / "gsm8k" / "test.parquet"), "--data", "generate:calculator/eval")
    words = ("eval", str(RECIPE), *data, "--rows", "16", "--n", "8", "--json", ENOUGH)
    found = json.loads(start(*words).finish())["sources"]
    assert len(found) == 3
    assert found["all"]["tasks"] == 32
    for figures in found.values():
        assert figures["missing"] == 0
        assert figures["pass@8"]["value"] > figures["pass@1"]["value"]


# what is evaluated -------------------------------------------------------------------------------------------------
def run_folder(tmp_path: Path, *steps: int, final: bool = False) -> Path:
    root = tmp_path / "runs" / "old"
    for step in steps:
        (root / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    root.mkdir(parents=True, exist_ok=True)
    recipe = {
        "name": "old",
        "model": str(MODEL),
        "runs_dir": str(tmp_path / "runs"),
        "agent": {"forks": {"branches": 1}},
    }
    (root / "config.yaml").write_text(json.dumps({**recipe, "data": {"train": "generate:calculator/train?train=8"}}))
    if final:
        (root / "final_model").mkdir()
    return root


TRAIN = {"split": "train", "rows": 2}


def test_the_final_model_then_the_newest_checkpoint(tmp_path: Path) -> None:
    plan = resolve_target(EvalRequest(run_folder(tmp_path, 4, 20, final=True), **TRAIN))
    assert (plan.export, Path(plan.config.model).name) == (None, "final_model")
    assert plan.config.agent.forks is None, "a task has one episode"
    plan = resolve_target(EvalRequest(run_folder(tmp_path / "b", 4, 20), **TRAIN))
    assert plan.export is not None
    assert (plan.export[1], plan.config.name) == (20, "old-eval-step20")
    plan = resolve_target(EvalRequest(run_folder(tmp_path / "c", 4, 20), checkpoint="4", samples=1, **TRAIN))
    assert plan.export is not None
    assert (plan.export[1], plan.temperature) == (4, 0.0)


def test_results_of_a_reward_are_not_those_of_the_edited_one(tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    request = EvalRequest(run_folder(tmp_path, 4), overrides=[f"agent.reward={reward}:compute_score"], **TRAIN)
    code = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}.0\n"
    reward.write_text(code.format(1))
    before = resolve_target(request).settings()
    assert resolve_target(request).settings() == before
    reward.write_text(code.format(0))
    after = resolve_target(request).settings()
    assert {name for name in after if after[name] != before[name]} == {"code"}


def test_results_of_a_checkpoint_are_not_those_of_a_run_that_was_started_anew(tmp_path: Path) -> None:
    """The model that the first evaluation exported stays in its folder."""
    request = EvalRequest(run_folder(tmp_path, 4), **TRAIN)
    marker = tmp_path / "runs" / "old" / "checkpoints" / "step_00000004" / "complete"
    marker.write_text("a digest")
    before = resolve_target(request)
    model = Path(before.config.model)
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"exported")
    assert before.settings() == (first := resolve_target(request).settings())
    marker.write_text("another digest")
    after = resolve_target(request).settings()
    assert {name for name in after if after[name] != first[name]} == {"weights"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint": "5"}, "no checkpoint of step 5; there: 4"),
        ({"checkpoint": "nowhere"}, "no model folder"),
        ({"checkpoint": "4", "url": "http://x"}, "--url and --checkpoint"),
        ({"temperature": 0.0}, "would be the same"),
        ({"split": "eval"}, "data.eval is not set"),
        ({"name": "a/b"}, "Names runs/NAME"),
        ({"overrides": ["agent.workers=0"]}, "agent.workers is 0"),
        ({"overrides": ["rollout.servers=0"]}, "rollout.servers is 0"),
        ({"target": Path("/usr/lib")}, "no run's folder"),
    ],
)
def test_what_cannot_be_evaluated_is_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    request = EvalRequest(**{"target": run_folder(tmp_path, 4), **TRAIN, **settings})
    with pytest.raises(ConfigError, match=said):
        resolve_target(request)
