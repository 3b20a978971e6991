"""How SGLang is started and what it is shown; no SGLang is needed here."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout_server import EngineError, RolloutConfig
from penstock.rollout_server.engines.http.server_process import Installation
from penstock.rollout_server.engines.sglang.server import (
    SGLangServer,
    cores_by_rank,
    environment,
    flags,
    held_port,
    ranks_of,
    show_model,
)


def test_users_flags_replace_ours_and_switches_have_no_negative_form() -> None:
    ours = {"random-seed": 0, "sleep-on-idle": True, "device": "cpu"}
    users = {"sleep_on_idle": False, "tp_size": 2, "json_model_override_args": {"a": 1}, "device": None}
    words = " ".join(flags(ours, users, "keep"))
    assert words == '--random-seed 0 --tp-size 2 --json-model-override-args {"a": 1}'


@pytest.mark.parametrize("name", ["port", "api_key", "skip-tokenizer-init", "model_path"])
def test_flags_that_the_adapter_depends_on_are_refused(name: str) -> None:
    with pytest.raises(EngineError, match="is set by Penstock itself"):
        flags({}, {name: "x"}, "keep")


def test_an_overlapped_schedule_is_refused_where_it_would_mislabel_tokens() -> None:
    with pytest.raises(EngineError, match="pause=recompute"):
        flags({}, {"disable_overlap_schedule": False}, "keep")
    assert flags({"disable-overlap-schedule": True}, {"disable_overlap_schedule": False}, "recompute") == []


@pytest.mark.parametrize(
    ("cpu", "pause", "off"),
    [(False, "keep", True), (False, "recompute", False), (False, "abort", False), (True, "recompute", True)],
)
def test_the_schedule_overlaps_on_gpus_unless_pauses_are_in_place(
    cpu: bool, pause: Any, off: bool, tmp_path: Path
) -> None:
    server = SGLangServer(RolloutConfig(pause=pause), str(model_folder(tmp_path, {})), tmp_path, 0)
    server.folder = tmp_path
    (tmp_path / "model").rename(tmp_path / "source")
    server.model = str(tmp_path / "source")
    _, command, _ = server.prepare(Installation("python", "0.5.23", cpu=cpu))
    server._free_port()
    assert ("--disable-overlap-schedule" in command) == off


def test_ranks_on_cpus_get_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [cores_by_rank(2, [0, 1, 2, 3]), cores_by_rank(2, [5]), cores_by_rank(3, [0, 1])]
    assert found == ["0,1|2,3", "5|5", "0|1|0"]
    for name in ("tp_size", "tp-size", "tensor_parallel_size", "tp"):
        assert ranks_of({name: 2, "stream_interval": 4}) == 2
    assert ranks_of({"tp_size": None}) == 1
    assert ranks_of({"tp": 2, "dp_size": 3, "pp_size": 2}) == 12
    assert ranks_of({"tp": 4, "dp_size": 2, "enable_dp_attention": True}) == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    on_cpus, on_gpus = (Installation("python", "0.5.23", cpu=cpu) for cpu in (True, False))
    assert environment(on_cpus, 1, tmp_path, ranks=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "2|3"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(on_cpus, 1, tmp_path)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(on_gpus, 1, tmp_path, ranks=2)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "theirs")
    assert environment(on_cpus, 1, tmp_path, ranks=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "theirs"


async def test_a_server_that_ends_at_once_names_the_cause_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    answer = json.dumps({"versions": {"sglang": "0.5.23"}, "gpu": False})
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -I ] && echo \'{answer}\' && exit\necho "ValueError: this model is not one" >&2\nexit 1\n'
    )
    python.chmod(0o755)
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "private"))
    server = SGLangServer(RolloutConfig(sglang_python=str(python)), str(model_folder(tmp_path, {})), tmp_path, 0)
    with pytest.raises(EngineError, match="ended while it started: ValueError: this model is not one"):
        await server.start()
    assert not server.alive
    assert os.listdir(tmp_path / "private") == []


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text('{"eos_token_id": [7], "temperature": 0.6}')
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def test_the_model_is_shown_without_ids_that_end_answers(tmp_path: Path) -> None:
    config = {"vocab_size": 9, "eos_token_id": 1, "text_config": {"hidden_size": 4, "eos_token_id": [1, 2]}}
    shown = show_model(str(model_folder(tmp_path, config)), tmp_path / "shown")
    assert sorted(path.name for path in shown.iterdir()) == ["config.json", "model.safetensors"]
    assert (shown / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((shown / "config.json").read_text()) == {
        "vocab_size": 9,
        "eos_token_id": None,
        "text_config": {"hidden_size": 4, "eos_token_id": None},
    }


def test_the_port_is_kept_for_sglang_until_it_listens() -> None:
    with held_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with (
            socket.create_server(("127.0.0.1", port)),
            socket.create_connection(("127.0.0.1", port)),
            pytest.raises(OSError, match="in use"),
        ):
            socket.create_server(("127.0.0.1", port))


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no-such/model is neither a folder nor in the hub's cache"):
        show_model("no-such/model", tmp_path / "shown")


def test_a_model_that_sees_is_refused_on_cpus(tmp_path: Path) -> None:
    model = model_folder(tmp_path, {"model_type": "qwen2_5_vl", "image_token_id": 7, "vision_config": {}})
    server = SGLangServer(RolloutConfig(engine="sglang"), str(model), tmp_path, 0)
    with pytest.raises(EngineError, match="sees images") as refused:
        server.prepare(Installation("python", "0.5.23", cpu=True))
    assert not refused.value.retryable


def command_of(config: RolloutConfig, tmp_path: Path, *, cpu: bool) -> list[str]:
    model = model_folder(tmp_path, {"model_type": "qwen3"})
    server = SGLangServer(config, str(model), tmp_path, 0)
    server.folder = tmp_path / "server"
    server.folder.mkdir()
    return server.prepare(Installation("python", "0.5.23", cpu=cpu))[1]


def test_offloaded_keys_and_values_are_shared_by_sglangs_ranks(tmp_path: Path) -> None:
    config = RolloutConfig(engine="sglang", kv_offload_gb=81, sglang_args={"tp_size": 2})
    command = command_of(config, tmp_path, cpu=False)
    assert "--enable-hierarchical-cache" in command
    assert command[command.index("--hicache-size") + 1] == "40"


def test_places_for_adapters_on_gpus_include_one_for_the_model_alone(tmp_path: Path) -> None:
    command = command_of(RolloutConfig(engine="sglang", adapter_rank=32), tmp_path, cpu=False)
    assert "--enable-lora" in command
    given = {name: command[command.index(name) + 1] for name in ("--max-lora-rank", "--max-loras-per-batch")}
    assert given == {"--max-lora-rank": "32", "--max-loras-per-batch": "9"}


def test_adapters_on_cpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rollout\.adapter_rank: .* rollout\.engine vllm and hf"):
        command_of(RolloutConfig(engine="sglang", adapter_rank=32), tmp_path, cpu=True)


@pytest.mark.parametrize(("ranks", "cpu", "fix"), [(4, False, "set it to 4"), (1, True, r"rollout\.kv_cache_tokens")])
def test_what_sglang_cannot_offload_is_refused(tmp_path: Path, ranks: int, cpu: bool, fix: str) -> None:
    config = RolloutConfig(engine="sglang", kv_offload_gb=2, sglang_args={"tp_size": ranks})
    with pytest.raises(EngineError, match=rf"rollout\.kv_offload_gb: .*{fix}") as refused:
        command_of(config, tmp_path, cpu=cpu)
    assert not refused.value.retryable
