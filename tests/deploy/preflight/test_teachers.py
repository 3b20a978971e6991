"""What `penstock run` says of teachers before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE

from penstock.deploy import ConfigError, load_config
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.routing import token_bytes
from penstock.deploy.preflight.teachers import check_teachers


def found(*overrides: str) -> list[Check]:
    return list(check_teachers(load_config(RECIPE, overrides)))


def test_runs_without_teachers_are_not_asked() -> None:
    assert found() == []


def test_learning_needs_a_teacher() -> None:
    (check,) = found("trainer.distill.in_loss=1")
    assert not check.ok
    assert "name a teacher per data source" in check.fix


def test_a_teacher_that_is_away_is_refused_by_its_field() -> None:
    *warned, check = found("agent.teachers={sums: {url: 'http://127.0.0.1:9'}}")
    assert [one.verdict for one in warned] == ["warn"]
    assert (check.name, check.ok) == ("agent.teachers.sums", False)
    assert "127.0.0.1:9" in check.found
    assert "agent.teachers.*.url" in check.fix


def test_a_token_is_sent_to_one_host_only() -> None:
    two = "sums: {url: 'http://127.0.0.1:9'}, code: {url: 'https://api.example.com'%s}"
    with pytest.raises(
        ConfigError, match=r"(?i)agent\.teachers.*PENSTOCK_TEACHER_TOKEN .* api\.example\.com would get it"
    ):
        found("agent.teachers={" + two % "" + "}")
    own = load_config(RECIPE, ["agent.teachers={" + two % ", key_variable: THEIRS" + "}"])
    assert own.agent.teachers["code"].key_variable == "THEIRS"


def test_rows_without_a_teacher_need_a_reward(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "1+1?"}]
    row = {"prompt": prompt, "data_source": "code", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    given = (f"data.train={tmp_path / 'rows.jsonl'}", "agent.teachers={sums: {url: 'http://127.0.0.1:9'}}")
    mixed = found(*given, "trainer.distill.in_loss=1")[0]
    assert (mixed.verdict, "code" in mixed.found) == ("warn", True)
    alone = found(*given, "trainer.distill.in_loss=1", "trainer.distill.reward_weight=0")[0]
    assert (alone.verdict, "they would teach nothing" in alone.found) == ("FAIL", True)


def test_the_bytes_of_likeliest_ids_are_said_and_bounded() -> None:
    """9 of every token, 4 of the teacher's logprob, 8 of each id; the queue's own checks count them."""
    teacher = "agent.teachers={sums: {url: 'http://127.0.0.1:9', top_k: %d}}"
    said = found(teacher % 20, "trainer.distill.in_loss=1")[0]
    assert (said.verdict, said.found) == ("ok", "top_k 20: 173 bytes per sampled token, up to 20.3 KiB per episode")
    assert token_bytes(load_config(RECIPE, [teacher % 20])) == 173
    long = found(teacher % 1024, "trainer.distill.in_loss=1", "agent.max_response_tokens=40000")[0]
    assert (long.verdict, "agent.teachers.*.top_k" in long.fix) == ("FAIL", True)
    assert "256.0 MiB" in long.found
