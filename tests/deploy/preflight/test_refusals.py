"""What `penstock run` refuses before it costs anything, and with which fix."""

import http.server
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.deploy import load_config, run_recipe
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.suite import run_checks

REPOSITORY = Path(__file__).parents[3]
RECIPE = REPOSITORY / "recipes" / "calculator.yaml"

pytestmark = [pytest.mark.redis, pytest.mark.bwrap]


def failures(*overrides: str) -> dict[str, Check]:
    return {check.name: check for check in run_checks(load_config(RECIPE, overrides)) if not check.ok}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPOSITORY / "recipes" / "calculator" / "model", tmp_path / "model"))


def test_the_recipe_as_it_is_passes() -> None:
    assert failures() == {}


def test_dry_run_refuses_what_a_start_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["model=nowhere", "data.train=none.jsonl", "agent.loop=none.py:Loop"]
    assert run_recipe(RECIPE, wrong, resume=False, dry_run=True) == 2
    printed = capsys.readouterr()
    assert "model: nowhere" in printed.out, "the resolved recipe comes first"
    for line in ("model: nowhere", "data: none.jsonl", "agent.loop: none.py:Loop"):
        assert line in printed.err
    assert "no file 'none.py'" in printed.err


def test_stale_tokens_need_a_correction() -> None:
    found = failures("trainer.correction=null")
    assert "trainer.correction=truncated_is" in found["trainer.correction"].fix
    assert failures("trainer.correction=null", "max_staleness=0") == {}


def test_an_engine_that_cannot_see_is_given_no_pictures(tmp_path: Path) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
    row = {
        **{"data_source": "calculator", "prompt": [{"role": "user", "content": "<image>Which colour?"}]},
        **{"reward_model": {"ground_truth": "red"}, "images": [f"data:image/png;base64,{pixel}"]},
    }
    (tmp_path / "seen.jsonl").write_text(json.dumps(row) + "\n")
    data = f"data.train={tmp_path / 'seen.jsonl'}"
    assert "rollout.engine=vllm or hf" in failures(data, "rollout.engine=sglang")["data"].fix
    assert "data" not in failures(data)
    assert "data" not in failures("rollout.engine=sglang")


def test_one_member_is_no_group_for_grpo() -> None:
    assert "2 or more" in failures("group_size=1")["trainer.advantage"].fix


def test_ranks_that_are_no_whole_copies_of_the_model() -> None:
    found = failures("trainer.engine=megatron", "trainer.ranks=3", "trainer.parallel.tensor=2")
    assert "must be a multiple" in found["trainer.engine"].fix


def test_a_response_that_leaves_no_room_for_a_prompt() -> None:
    assert "raise rollout.max_model_len" in failures("agent.max_response_tokens=256")["rollout.max_model_len"].fix


def test_compaction_bounds_a_segment_by_its_own_settings() -> None:
    compaction = ("agent.loop=compaction", "agent.max_response_tokens=9000", "agent.settings.max_summary_tokens=20")
    assert failures(*compaction, "agent.settings.compact_at=100") == {}
    assert failures(*compaction, "agent.settings.compact_at=300")["rollout.max_model_len"].fix.endswith(
        "agent.settings"
    )
    assert (
        "agent.settings.compact_at"
        in failures(*compaction, "agent.settings.compact_at=0")["rollout.max_model_len"].found
    )


@pytest.mark.parametrize("override", ["agent.top_p=0.9", "agent.top_k=20"])
def test_truncated_sampling_has_to_be_asked_for(override: str) -> None:
    assert "rollout.truncated_sampling=true" in failures(override)["rollout.truncated_sampling"].fix
    assert failures(override, "rollout.truncated_sampling=true") == {}


def test_refusal_of_a_step_that_cannot_be_filled_or_held(tmp_path: Path) -> None:
    few = failures("transfer_queue.max_groups=3", "groups_per_step=4")["transfer_queue"].fix
    assert "max_groups = 3 < groups_per_step = 4" in few
    small = failures("transfer_queue.max_bytes=1000", "groups_per_step=4", "group_size=2")["transfer_queue"].fix
    assert "max_bytes = 1000 < groups_per_step × group_size × bytes per token × response tokens = 4 × 2 × 9 ×" in small
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
    lines = [json.dumps(row | {"data_source": source}) + "\n" for source in ("sums", "code", "sums")]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    given = (f"data.train={tmp_path / 'rows.jsonl'}", "groups_per_step=4", "transfer_queue.quotas={sums: 1, code: 2}")
    assert "quotas: code 2 + sums 1 = 3 < groups_per_step = 4" in failures(*given)["transfer_queue"].fix
    assert "transfer_queue" not in failures(*given[:2], "transfer_queue.quotas={sums: 1}")


def test_a_missing_model_folder_is_named() -> None:
    found = failures("model=./no/such/model")["model"]
    assert "no such folder" in found.found
    assert "config.json" in found.fix


def test_a_model_without_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "has no chat template" in failures(f"model={model}")["chat template"].fix


def test_a_template_that_ignores_tools(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert "ignores tools" in failures(f"model={model}")["chat template"].fix


def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = failures(f"rollout.port={port}")["rollout.port"]
    assert str(port) in found.found
    assert "rollout.port=0" in found.fix


def test_without_bwrap_there_is_no_weaker_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = failures()
    assert "apt-get install bubblewrap" in found["sandbox"].fix
    assert "apt-get install redis-server" in found["redis-server"].fix


def test_a_dataset_without_a_needed_column(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "hello"}]}) + "\n")
    assert "data_source" in failures(f"data.train={rows}")["data"].fix


def test_a_malformed_row_is_named_by_its_number(tmp_path: Path) -> None:
    good = {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "data_source": "calculator",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(good) + "\n" + json.dumps({**good, "prompt": []}) + "\n")
    assert "row 2" in failures(f"data.train={rows}")["data"].fix


def test_an_unknown_tool_names_the_nearest() -> None:
    assert "'python'" in failures("tools=[{name: pyton}]")["chat template"].fix


def test_shared_memory_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(
        "penstock.deploy.preflight.memory_checks.shutil.disk_usage", lambda _: usage._replace(free=1 << 20)
    )
    assert "--shm-size" in failures()["shared memory"].fix


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_refusal_of_an_environment_without_the_engine(engine: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"versions": {}, "plugin": false, "gpu": false}'\n""")
    python.chmod(0o755)
    check = failures(f"rollout.engine={engine}", f"rollout.{engine}_python={python}")["rollout.engine"]
    assert check.found == engine
    assert f"scripts/setup-{engine} makes the environment" in check.fix


def test_rows_without_a_reward_are_named(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({**row, "data_source": name}) + "\n" for name in ("openai/gsm8k", "elsewhere")))
    overrides = ("agent.reward=by_data_source", f"data.train={data}")
    assert "no reward for data_source 'elsewhere'" in failures(*overrides)["agent.reward"].fix
    assert "agent.reward" not in failures(*overrides, "agent.rewards.sources={elsewhere: search_em}")


def test_refusal_of_a_missing_reward_file(tmp_path: Path) -> None:
    missing = tmp_path / "no_reward.py"
    assert str(missing) in failures(f"agent.reward={missing}:score")["agent.reward"].fix


@pytest.mark.parametrize(("source", "needed"), [("codecontests", True), ("openai/gsm8k", False)])
def test_refusal_of_code_rewards_without_boxes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, needed: bool
) -> None:
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}, "data_source": source}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = failures("tools=[]", "agent.reward=by_data_source", f"data.train={tmp_path / 'rows.jsonl'}")
    assert ("sandbox" in found) is needed


@pytest.fixture
def health() -> Iterator[str]:
    """URL of what answers like a sandbox server to whoever has the token."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer of-this-run" and self.path == "/health"
            self.send_response(200 if known else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not to this test's stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_sandbox_server_is_asked_with_the_runs_token(health: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = ("sandbox.backend=remote", f"sandbox.url={health}")
    monkeypatch.setenv("PENSTOCK_TOKEN", "of-this-run")
    assert failures(*remote) == {}
    monkeypatch.setenv("PENSTOCK_TOKEN", "another")
    assert "refuses this token" in failures(*remote)["sandbox"].fix
    monkeypatch.delenv("PENSTOCK_TOKEN")
    assert "PENSTOCK_TOKEN" in failures(*remote)["sandbox"].fix
