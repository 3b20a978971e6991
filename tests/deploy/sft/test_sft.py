"""`penstock sft` as a person starts it: data, training, kill and resume, what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.living_command import LivingCommand, commands, lines
from tests.deploy.sft_data import MODEL, tool_trace, traces, write_messages
from tests.living import alive

pytest.importorskip("torch")

from safetensors.torch import load_file

from penstock.agent_loops import BadDemonstration, TemplateError
from penstock.deploy import ConfigError
from penstock.deploy.sft.head import fine_tune_recipe, load_sft_config
from penstock.deploy.sft.prepared import prepare
from penstock.trainer import ConversationFile

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
LONG = 150
"""Steps of a run that is killed in its middle: far more than pass while a test looks."""
SAME = ("step", "version", "loss", "grad_norm", "lr", "tokens", "tokens_trained", "conversations")


Start = Callable[..., LivingCommand]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`penstock sft` on the recipe of the folder."""
    with commands(tmp_path) as begin:

        def sft(*overrides: str, folder: Path = tmp_path) -> LivingCommand:
            return begin("sft", str(recipe_in(folder)), *overrides, folder=folder)

        yield sft


def recipe_in(folder: Path, **further: Any) -> Path:
    """The calculator's model and its tool's schema in every row: no recipe's tools, no tasks."""
    path = folder / "sft.yaml"
    path.write_text(json.dumps({"name": "mine", "model": str(MODEL), "sft": {"lr": 5e-4, "batch": 4}, **further}))
    return path


PYTHON = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run Python code. Variables persist between calls.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


def messages_in(folder: Path, count: int = 24, name: str = "messages.jsonl", seed: int = 0) -> Path:
    return write_messages(folder / name, traces(count, seed), tools=PYTHON)


def learned(root: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in SAME} for row in lines(root / "metrics.jsonl")]


# the folder of the new model ---------------------------------------------------------------------------------------
def test_a_folder_that_is_not_this_runs_model_is_never_replaced(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "models"
    out.mkdir()
    (out / "precious").write_text("kept")
    recipe, given = recipe_in(tmp_path), [f"runs_dir={tmp_path / 'runs'}", f"sft.out={out}"]
    for resume in (False, True):
        assert fine_tune_recipe(recipe, given, resume=resume) == 2
        assert "sft.out:" in capsys.readouterr().err
    (out / "config.json").write_text("{}")  # a model of others
    assert fine_tune_recipe(recipe, given, resume=False) == 2
    assert (out / "precious").read_text() == "kept"
    for base in (MODEL, MODEL.parent):
        assert fine_tune_recipe(recipe, [f"runs_dir={tmp_path}", f"sft.out={base}"], resume=True) == 2
        assert "training starts from" in capsys.readouterr().err


def test_what_sft_cannot_begin_with_is_refused_with_its_field_and_a_fix(tmp_path: Path, capsys: Any) -> None:
    recipe = recipe_in(tmp_path, data={"train": "none.parquet"})
    policy = f"sft.policy={MODEL.parent.parent / 'retool/policies.py'}:oracle"
    for given, words, resume in (
        ([policy], ["data: ", "none.parquet: no such file", "fix: "], False),
        (["sft.messages=none.jsonl"], ["name: ", "no such run", "fix: ", "--resume"], True),
    ):
        assert fine_tune_recipe(recipe, [f"runs_dir={tmp_path / 'runs'}", *given], resume=resume) == 2
        printed = capsys.readouterr().err
        assert [word for word in words if word not in printed] == []
    assert not (tmp_path / "runs").exists()


def test_a_refused_fine_tuning_leaves_no_folder_but_one_that_was_there(tmp_path: Path, capsys: Any) -> None:
    recipe, given = recipe_in(tmp_path), [f"runs_dir={tmp_path / 'runs'}"]
    assert fine_tune_recipe(recipe, given, resume=False) == 2
    assert "nothing to train on" in capsys.readouterr().err
    root = tmp_path / "runs" / "mine-sft"
    assert not root.exists()
    root.mkdir()
    assert fine_tune_recipe(recipe, given, resume=False) == 2
    assert root.exists()


# training ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_messages_become_a_model(tmp_path: Path, start: Start) -> None:
    """A tool trace that the base model mostly does not write: its loss falls, also on problems that it never saw."""
    messages_in(tmp_path)
    messages_in(tmp_path, 8, "validation.jsonl", seed=9)
    given = ("sft.messages=messages.jsonl", "sft.validation=validation.jsonl", "sft.epochs=2", "sft.eval_every=4")
    run = start(*given)
    run.finish()
    root = tmp_path / "runs" / "mine-sft"
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["steps"], summary["ended"]) == (12, "all 12 steps are trained")
    assert (summary["conversations"], summary["left_out"]) == (24, {})
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["eval_loss_last"] < 0.5 * summary["eval_loss_first"]
    assert [line["version"] for line in lines(root / "eval.jsonl")] == [0, 4, 8, 12]
    rows = lines(root / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    assert rows[3]["eval/loss"] == lines(root / "eval.jsonl")[1]["loss"]
    assert rows[-1]["epoch"] == pytest.approx(2.0)
    assert list((root / "tensorboard").iterdir())
    assert {file.name for file in (root / "final_model").iterdir()} >= {"model.safetensors", "chat_template.jinja"}
    log = run.log.read_text()
    for words in ("24 conversations", "validation loss", "mine-sft: all 12 steps are trained", f"model      {root}"):
        assert words in log
    start(*given, "--resume").finish()
    assert "nothing is left to do of 12 steps" in run.log.read_text()
    assert len(lines(root / "metrics.jsonl")) == 12
    assert "{" not in log
    start("sft.messages=messages.jsonl").finish(status=2)
    assert "holds an earlier run" in run.log.read_text()


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("killed", ["the trainer", "everything"])
def test_a_killed_run_comes_to_the_same_bits(
    killed: str, tmp_path: Path, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It continues at its newest checkpoint's step, and no step is missing or twice."""
    messages_in(tmp_path)
    given = ("sft.messages=messages.jsonl", f"sft.steps={LONG}", "trainer.checkpoint_every=7", "trainer.sinks=[]")
    run, root = start(*given), tmp_path / "runs" / "mine-sft"
    metrics, checkpoints = root / "metrics.jsonl", root / "checkpoints"
    run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 10)
    run.wait_for(lambda: bool(list(checkpoints.glob("step_*/complete"))))
    (pid,) = run.pids("sft-rank")
    if killed == "everything":
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(60)
        deadline = time.monotonic() + 60
        while alive(pid):
            assert time.monotonic() < deadline, "the trainer outlived its head"
            time.sleep(0.05)
        run = start(*given, "--resume")
    else:
        os.kill(pid, signal.SIGKILL)
    run.finish()
    log = (root / "logs" / "trainer.log").read_text()
    assert re.search(r"restored step_\d+: step [1-9]", log)
    assert [row["step"] for row in lines(metrics)] == list(range(LONG))
    summary = json.loads((root / "summary.json").read_text())
    assert summary["restarts"]["trainer"] == (1 if killed == "the trainer" else 0)

    whole = tmp_path_factory.mktemp("whole")
    messages_in(whole)
    start(*given, folder=whole).finish()
    assert learned(root) == learned(whole / "runs" / "mine-sft")
    ours, theirs = (load_file(one / "final_model/model.safetensors") for one in (root, whole / "runs/mine-sft"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


@pytest.mark.deep
def test_sigterm_saves_and_resume_continues(tmp_path: Path, start: Start) -> None:
    messages_in(tmp_path)
    given = ("sft.messages=messages.jsonl", f"sft.steps={LONG}", "trainer.checkpoint_every=1000", "trainer.sinks=[]")
    run, root = start(*given), tmp_path / "runs" / "mine-sft"
    metrics = root / "metrics.jsonl"
    run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5)
    run.process.send_signal(signal.SIGTERM)
    run.finish(status=130)
    assert "--resume" in run.log.read_text()
    done = len(lines(metrics))
    assert (root / "checkpoints" / f"step_{done:08d}" / "complete").exists()
    start(*given, "sft.max_tokens=100", "--resume").finish(status=2)
    assert "began with other data (sft.max_tokens: 0 → 100)" in run.log.read_text()
    start(*given, "--resume").finish()
    assert [row["step"] for row in lines(metrics)] == list(range(LONG))
    assert f"step {done}" in (root / "logs" / "trainer.log").read_text()


def test_a_second_interrupt_kills_the_trainer_without_a_traceback(tmp_path: Path, start: Start) -> None:
    """A suspended trainer saves no checkpoint: the second Ctrl-C always comes while the first one waits for it.

    It has trained a step by then: in its first moments it has no handler yet, and SIGTERM may end even one suspended.
    """
    messages_in(tmp_path)
    run = start("sft.messages=messages.jsonl", "sft.steps=100000", "trainer.sinks=[]")
    metrics = tmp_path / "runs" / "mine-sft" / "metrics.jsonl"
    run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1)
    (pid,) = run.pids("sft-rank")
    os.kill(pid, signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "saving a checkpoint" in run.log.read_text())
    run.process.send_signal(signal.SIGINT)
    run.finish(status=130)
    text = run.log.read_text()
    assert "SIGINT again: the checkpoint under way is given up" in text
    assert "Traceback" not in text, text
    assert text.rstrip().splitlines()[-1].startswith("interrupted; continue with: penstock sft ")
    assert not alive(pid)


@pytest.mark.deep
def test_two_ranks_and_lora(tmp_path: Path, start: Start) -> None:
    """Two ranks learn what one does, up to rounding; under LoRA the adapter is left too."""
    pytest.importorskip("peft")
    messages_in(tmp_path)
    given = ("sft.messages=messages.jsonl", "sft.steps=8", "trainer.lora.rank=4", "sft.lr=1e-3")
    start(*given, "name=one").finish()
    start(*given, "name=two", "trainer.ranks=2").finish()
    one, two = (lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)
    assert one[-1]["loss"] < one[0]["loss"]
    assert (tmp_path / "runs" / "two" / "final_adapter" / "adapter_model.safetensors").exists()


# data --------------------------------------------------------------------------------------------------------------
def prepared(folder: Path, **sft: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return prepare(load_sft_config(recipe_in(folder, sft=sft, runs_dir=str(folder))), folder / "data")


def conversations(folder: Path, side: str = "train") -> list[tuple[list[int], list[int]]]:
    """(prompt, response) of each."""
    file = ConversationFile(folder / "data" / f"{side}.safetensors")
    segments = (file.segment(number) for number in range(len(file)))
    return [(one.prompt_ids.tolist(), one.response_ids.tolist()) for one in segments]


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = messages_in(tmp_path, 3)
    with file.open("a") as more:
        more.write('{"messages": [{"role": "user", "content": "x"}]}\n{"messages": 3}\n')
    with pytest.raises(BadDemonstration, match=r"messages\.jsonl, line 4: .*ends with role user"):
        prepared(tmp_path, messages=str(file))
    found = prepared(tmp_path, messages=str(file), bad_rows="skip")
    assert (found.conversations, found.left_out) == (3, {"bad rows": 2})


USER, REPLY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}


def deep(levels: int) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": f'{{"a": {"[" * levels}{"]" * levels}}}'}}


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    return {**REPLY, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


SHELF = {"type": "object", "properties": {"shelf": {"type": "integer"}}, "required": ["shelf"]}
STOCK = {"type": "function", "function": {"name": "stock", "parameters": SHELF}}


def row_of(*messages: Any, **columns: Any) -> str:
    return json.dumps({"messages": messages, **columns})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "the line is not valid JSON"),
        ('{"text": "x"}', "column 'messages' is missing; found text"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"messages\[0\] needs a role"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "f"}]}]}',
            r"messages\[1\]\.tool_calls\[0\] must be",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}',
            r"messages\[1\]: the model's message has neither",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}', r"tools\[0\] must be"),
        (row_of(USER, tools=[{"function": {"name": 5}}]), r"tools\[0\] must be"),
        (row_of(USER, {"role": "assistant", "content": "x\ud83d"}), r"messages\[1\] cannot be encoded: .*surrogates"),
        (row_of(USER, tools=[{"function": {"name": "f\ud83d"}}]), r"tools\[0\] cannot be encoded: .*surrogates"),
        (row_of(USER, REPLY, tools=[{"function": {"name": 'a"b'}}]), r".*not shown: a\"b"),
        (row_of(USER, {**REPLY, "tool_calls": [deep(700)]}), "maximum recursion depth"),
        (row_of(USER, calling("stok", shelf=1), tools=[STOCK]), r"messages\[1\] calls 'stok', no tool; did you mean"),
        (row_of(USER, calling("stock", shelf="x"), tools=[STOCK]), r"messages\[1\], call of stock: argument 'shelf'"),
    ],
)
def test_what_a_row_lacks_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with pytest.raises((BadDemonstration, TemplateError), match=rf"rows\.jsonl, line 1: {said}"):
        prepared(tmp_path, messages=str(file))


@pytest.mark.parametrize("schema", [SHELF, {**SHELF, "type": "dict"}, {**SHELF, "properties": 3}, None])
def test_calls_that_fit_or_whose_tool_has_no_schema_are_trained_on(schema: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    tool = {"type": "function", "function": {"name": "stock", "parameters": schema}}
    file.write_text(row_of(USER, calling("stock", shelf=3), tools=[tool]) + "\n")
    assert prepared(tmp_path, messages=str(file)).conversations == 1


def test_without_data_or_with_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set sft\.messages"):
        prepared(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        prepared(tmp_path, messages="nowhere.jsonl")


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    """Also where messages and tools are JSON as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    messages = traces(5)
    filled = json.dumps([{**PYTHON[0], "strict": None}])  # as Parquet fills what other rows have
    rows = [{"messages": json.dumps(each), "tools": filled} for each in messages]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prepared(tmp_path, messages=str(tmp_path / "rows.parquet"))
    prepared(tmp_path / "other", messages=str(messages_in(tmp_path, 5)))
    assert conversations(tmp_path) == conversations(tmp_path / "other")
    assert len(conversations(tmp_path)) == 5


def test_parquet_of_nested_messages_holds_the_same_rows(tmp_path: Path) -> None:
    """Parquet adds to each message and each part the keys that others have, as nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": tool_trace(f"{number}+1"), "tools": PYTHON} for number in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert "tool_calls" in pq.read_table(tmp_path / "rows.parquet").to_pylist()[0]["messages"][0]
    prepared(tmp_path, messages=str(tmp_path / "rows.parquet"))
    text = write_messages(tmp_path / "rows.jsonl", [row["messages"] for row in rows], tools=PYTHON)
    prepared(tmp_path / "other", messages=str(text))
    assert conversations(tmp_path) == conversations(tmp_path / "other")
    assert len(conversations(tmp_path)) == 5


def test_prompts_are_held_out_whole(tmp_path: Path) -> None:
    """Rows with one prompt are never on both sides; the share is of prompts, and follows from the seed."""
    twice = [tool_trace(f"{number}+1") for number in range(10, 30) for _ in range(2)]
    file = write_messages(tmp_path / "rows.jsonl", twice, tools=PYTHON)
    found = prepared(tmp_path, messages=str(file), validation_share=0.25)
    assert (found.conversations, found.validation) == (30, 10)
    train, held = ({tuple(prompt) for prompt, _ in conversations(tmp_path, s)} for s in ("train", "validation"))
    assert not train & held
    with pytest.raises(ConfigError, match=r"sft\.validation_share: 0\.04 of 20 prompts is none; set 0\.05 or more"):
        prepared(tmp_path / "none", messages=str(file), validation_share=0.04)


def test_long_conversations_are_left_out(tmp_path: Path) -> None:
    file = write_messages(tmp_path / "rows.jsonl", [tool_trace("1+1"), tool_trace("1+1+1+1+1+1+1")], tools=PYTHON)
    prepared(tmp_path, messages=str(file))
    shorter, _ = (len(prompt) + len(response) for prompt, response in conversations(tmp_path))
    found = prepared(tmp_path / "other", messages=str(file), max_tokens=shorter)
    assert found.left_out == {f"longer than {shorter} tokens": 1}
