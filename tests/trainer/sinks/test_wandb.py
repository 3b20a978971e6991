"""A real offline run of W&B, read back from its own file."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.trainer import TrainerConfig
from penstock.trainer.sinks import SINKS, SinkJob
from penstock.trainer.sinks.async_sink import AsyncSink
from penstock.trainer.sinks.wandb import resume_id, without_secrets

SETTINGS = {
    "name": "calculator-7",
    "seed": 3,
    "transfer_queue": {"url": "redis://user:hidden@host:6379", "spill": True},
    "tools": [{"name": "search", "settings": {"api_key": "hidden", "top": 3}}],
    "trainer": TrainerConfig(wandb={"project": "sums", "group": "ablation", "samples": 1}).model_dump(mode="json"),
}


@pytest.fixture
def offline(monkeypatch):
    """As on a machine without a network: nothing is sent."""
    library = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return library


BLOCK, HEADER = 32 << 10, 7
FULL, LAST = 1, 4


def messages_in(data: bytes) -> Iterator[bytes]:
    """W&B's file is LevelDB's log format: pieces of messages in blocks, each after (checksum, length, kind)."""
    assert data.startswith(b":W&B")
    message, at = b"", HEADER
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # too little room for a piece: the block's rest is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield message
            message = b""


def records_of(run_dir: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    return [Record.FromString(message) for message in messages_in(path.read_bytes())]


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    def name(item: Any) -> str:
        return item.key or "/".join(item.nested_key)

    rows = [record.history.item for record in records if record.HasField("history")]
    return [{name(item): json.loads(item.value_json) for item in row} for row in rows]


def test_an_offline_run_holds_the_numbers_the_settings_and_no_secret(offline, run_dir, line, record) -> None:
    sink = AsyncSink("wandb", SINKS.get("wandb"), SinkJob(run_dir, SETTINGS))
    sink.rewind(0)
    sink.trajectories(0, [record])
    sink.step(1, line)
    sink.step(2, {**line, "reward": 0.75})
    sink.evaluation(1, {"eval/reward": 0.5})
    sink.close()
    records = records_of(run_dir)
    (run,) = [one.run for one in records if one.HasField("run")][:1]
    assert (run.project, run.run_group, run.display_name) == ("sums", "ablation", "calculator-7")
    assert run.run_id == resume_id(run_dir) == (run_dir / "wandb_id").read_text().strip()
    config = {update.key: update.value_json for update in run.config.update}
    assert json.loads(config["seed"]) == 3
    assert json.loads(config["tools"]) == [{"name": "search", "settings": {"top": 3}}]
    assert b"hidden" not in b"".join(one.SerializeToString() for one in records)
    rows = history_of(records)
    assert [(row["version"], row.get("reward"), row.get("eval/reward")) for row in rows] == [
        *((1, 0.25, None), (2, 0.75, None), (1, None, 0.5))
    ]
    assert rows[0]["staleness_tokens/1"] == 12
    assert rows[0]["episodes/_type"] == "table-file"
    (table,) = (run_dir / "wandb").glob("offline-run-*/files/media/table/*.table.json")
    assert "alert(1)" in json.loads(table.read_text())["data"][0][2]


def test_a_resumed_run_keeps_its_id(tmp_path) -> None:
    first = resume_id(tmp_path)
    assert len(first) == 16
    assert resume_id(tmp_path) == first


def test_without_a_key_the_run_goes_on_and_is_told_once(run_dir, line, caplog, monkeypatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, "penstock"):
        sink = AsyncSink("wandb", SINKS.get("wandb"), SinkJob(run_dir, {}))
        for version in (1, 2):
            sink.step(version, line)
        sink.close()
    told = [record.message for record in caplog.records if record.name.startswith("penstock")]
    assert len(told) == 1
    assert "wandb failed and is left out" in told[0]
    assert "WANDB_API_KEY is not set" in told[0]


def test_what_may_be_a_secret_is_not_in_the_settings() -> None:
    assert without_secrets({"a": {"hf_token": "x", "tokens": 5, "list": [{"password": "y", "b": 1}]}}) == {
        "a": {"tokens": 5, "list": [{"b": 1}]}
    }
