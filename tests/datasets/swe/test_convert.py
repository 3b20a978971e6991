"""Rows in the shapes of three published datasets become tasks that grade, or are refused by the name of a field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sandbox.swe.conftest import LIMITS, rows, sandbox
from tests.sandbox.swe.wordkit import git

from penstock.datasets.swe import BadFile, Places, convert
from penstock.datasets.swe.rows import BadRow
from penstock.datasets.swe.swe_bench import SWE_BENCH, SWE_GYM, swe_bench_task
from penstock.sandbox.swe import check_task, load_tasks
from penstock.trainer import load_rows

__all__ = ["rows", "sandbox"]


@pytest.fixture
def swe_bench(rows) -> list[dict]:
    """As SWE-bench's files have them: lists as JSON text, more columns than are needed."""
    names = ("instance_id", "base_commit", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS", "test_patch", "patch")
    more = {"repo": "tests/wordkit", "version": "1.0", "hints_text": "", "created_at": "2020-01-01"}
    return [{**{name: row[name] for name in names}, **more} for row in rows]


def write(path: Path, given: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(given), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    else:
        path.write_text(json.dumps(given))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_images_of_their_own(swe_bench, tmp_path, suffix):
    done = convert("swe-bench", write(tmp_path / f"raw{suffix}", swe_bench), tmp_path / "out", Places())
    assert (done.written, done.refused) == (3, [])
    first = load_rows(tmp_path / "out/train.parquet")[0]
    assert first.messages[0]["content"].endswith("Please mend wordkit-1.")
    assert first.extra_info["sandbox_image"] == "penstock-swe:wordkit-1"
    assert "base_commit" not in first.extra_info
    assert first.extra_info["test_command"] == "/opt/miniconda3/envs/testbed/bin/python -m pytest"
    lines = (tmp_path / "out/images.tsv").read_text().splitlines()
    assert lines[0] == "penstock-swe:wordkit-1\tswebench/sweb.eval.x86_64.wordkit-1:latest"


def test_published_images_by_dataset():
    assert SWE_BENCH.published("django__django-11099") == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert (
        SWE_GYM.published("Project-MONAI__MONAI-6975") == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-6975:latest"
    )


@pytest.mark.bwrap
@pytest.mark.parametrize("kind", ["swe-bench", "swe-gym"])
async def test_clones_of_this_machine_need_no_images(sandbox, rows, swe_bench, tmp_path, kind):
    """SWE-Gym has lists where SWE-bench has JSON text."""
    if kind == "swe-gym":
        for row in swe_bench:
            row.update({key: json.loads(row[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")})
    shutil.copytree(rows[0]["repository"], tmp_path / "clones/tests__wordkit", symlinks=True)
    places = Places(repositories=tmp_path / "clones", test_command="python3 -m pytest")
    convert(kind, write(tmp_path / "raw.parquet", swe_bench[:1]), tmp_path / "out", places)
    (fields,) = [json.loads(line) for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]
    (tmp_path / "out/train.jsonl").write_text(json.dumps({**fields, "packages": rows[0]["packages"]}) + "\n")
    (task,) = load_tasks(tmp_path / "out/train.jsonl")
    assert (await check_task(sandbox, task, LIMITS)).problems == ()
    assert not (tmp_path / "out/images.tsv").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"FAIL_TO_PASS": None}, "field 'FAIL_TO_PASS' is missing"),
        ({"FAIL_TO_PASS": "[]"}, "field 'FAIL_TO_PASS' is empty"),
        ({"FAIL_TO_PASS": "tests/a.py::b"}, "field 'FAIL_TO_PASS' is not JSON"),
        ({"PASS_TO_PASS": "[1]"}, "field 'PASS_TO_PASS' must be a list of texts"),
        ({"FAIL_TO_PASS": '["test_a"]'}, "'test_a', which is not an id of pytest"),
        ({"instance_id": ""}, "field 'instance_id' is empty"),
        ({"base_commit": 3}, "field 'base_commit' must be text, found int"),
        ({"problem_statement": None}, "field 'problem_statement' is missing"),
        ({"test_patch": " "}, "field 'test_patch' is empty"),
        ({"patch": None}, "field 'patch' is missing"),
    ],
)
def test_a_row_is_refused_by_the_name_of_its_field(swe_bench, tmp_path, changed, message):
    raw = [{**swe_bench[0], **changed}, swe_bench[1]]
    done = convert("swe-bench", write(tmp_path / "raw.jsonl", raw), tmp_path / "out", Places())
    assert done.written == 1
    (line,) = done.refused
    assert line.startswith(f"{tmp_path / 'raw.jsonl'}, row 1: ")
    assert message in line


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raw.csv", "", "unknown kind '.csv'"),
        ("raw.jsonl", "{", "row 1: not JSON"),
        ("raw.jsonl", b'{"repo": "\xe9"}', "row 1: not JSON: 'utf-8' codec can't decode"),
        ("raw.jsonl", "[]", "expected an object, found list"),
        ("raw.json", "{}", "expected a list of rows, found dict"),
        ("raw.parquet", "x", "not readable as Parquet"),
        ("raw.jsonl", '{"repo": "a"}', "no row could be converted:\n.*row 1: field 'test_patch' is missing"),
        ("raw.jsonl", "", "no row could be converted:\n.* is empty"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadFile, match=message):
        convert("swe-bench", tmp_path / name, tmp_path / "out", Places())
    with pytest.raises(BadFile, match="no such file"):
        convert("swe-bench", tmp_path / "nowhere", tmp_path / "out", Places())


def test_django_and_sympy_write_other_ids(swe_bench):
    django = {**swe_bench[0], "repo": "django/django", "PASS_TO_PASS": '["test_b (app.tests.CaseTests.test_b)"]'}
    django["FAIL_TO_PASS"] = '["test_a (app.tests.CaseTests)"]'
    task = swe_bench_task(django, SWE_BENCH)
    assert (task["FAIL_TO_PASS"], task["PASS_TO_PASS"]) == (
        ["app.tests.CaseTests.test_a"],
        ["app.tests.CaseTests.test_b"],
    )
    assert task["test_command"].endswith("{test}")
    with pytest.raises(BadRow, match=r"FAIL_TO_PASS.*a docstring"):
        swe_bench_task({**django, "FAIL_TO_PASS": '["Sums are summed."]'}, SWE_BENCH)
    sympy = {**swe_bench[0], "repo": "sympy/sympy", "FAIL_TO_PASS": '["test_x"]', "PASS_TO_PASS": "[]"}
    assert swe_bench_task(sympy, SWE_BENCH)["FAIL_TO_PASS"] == ["tests/test_slug.py::test_x"]
    two = sympy["test_patch"] + sympy["test_patch"].replace("test_slug", "test_other")
    with pytest.raises(BadRow, match="test_patch changes 2 files"):
        swe_bench_task({**sympy, "test_patch": two}, SWE_BENCH)


# ---- R2E


def log(**outcomes: str) -> str:
    lines = "\n".join(f"\x1b[32m{outcome}\x1b[0m r2e_tests/test_1.py::{test}" for test, outcome in outcomes.items())
    return f"noise\n===== short test summary info =====\n{lines}\n==== 1 failed ====\n"


@pytest.fixture
def r2e(rows) -> dict:
    repository = Path(rows[0]["repository"])
    base = rows[0]["base_commit"]
    before, after = (git(repository, "show", f"{commit}:wordkit/slug.py") for commit in (base, "wordkit-1"))
    tests = git(repository, "show", "wordkit-1:tests/test_slug.py").replace("(title):", "(title='Hello, big World'):")
    diffs = [
        {"header": {"file": {"path": "wordkit/slug.py"}}, "old_file_content": before, "new_file_content": after},
        {"header": {"file": {"path": "tests/test_slug.py"}}, "old_file_content": "", "new_file_content": "no"},
    ]
    names = ("test_slugify", "test_slugify_takes_a_separator", "test_shorten_keeps_short_texts")
    passed = dict.fromkeys(names, "PASSED")
    return {
        "repo_name": "wordkit",
        "docker_image": "somebody/wordkit_final:0123abcd",
        "commit_hash": "0123abcd",
        "problem_statement": "Write an issue.\n[ISSUE]\nThe separator is ignored.\n[/ISSUE]\n",
        "parsed_commit_content": json.dumps({"file_diffs": diffs, "old_commit_hash": "a", "new_commit_hash": "b"}),
        "expected_output_json": json.dumps({**passed, "TestX.test_bad": "FAILED"}),
        "execution_result_content": json.dumps({
            "test_file_names": ["test_1.py"],
            "test_file_codes": [tests],
            "old_commit_res_stdout": log(**{**passed, names[1]: "FAILED"}, **{"TestX::test_bad": "FAILED"}),
            "new_commit_res_stdout": log(**passed, **{"TestX::test_bad": "FAILED"}),
        }),
        "prompt": "the fix is …",
    }  # fmt: skip


def test_r2e_without_its_image_has_no_repository(r2e, tmp_path):
    with pytest.raises(BadFile, match="field 'base_commit' is missing"):
        convert("r2e", write(tmp_path / "raw.jsonl", [r2e]), tmp_path / "out", Places(repositories=tmp_path))


@pytest.mark.bwrap
async def test_r2e_is_split_by_its_logs_and_graded_by_tests_of_the_row(sandbox, rows, r2e, tmp_path):
    convert("r2e", write(tmp_path / "raw.jsonl", [r2e]), tmp_path / "out", Places())
    (fields,) = [json.loads(line) for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]
    assert fields["instance_id"] == "wordkit-0123abcd"
    assert fields["problem_statement"] == "The separator is ignored."
    assert fields["FAIL_TO_PASS"] == ["r2e_tests/test_1.py::test_slugify_takes_a_separator"]
    assert len(fields["PASS_TO_PASS"]) == 2
    assert "prompt" not in fields
    assert "tests/test_slug.py" not in fields["patch"], "a fix is no test"
    here = {key: rows[0][key] for key in ("repository", "base_commit", "packages")}
    placed = {**fields, **here, "test_command": "python3 -m pytest", "sandbox_image": None}
    (tmp_path / "out/train.jsonl").write_text(json.dumps(placed) + "\n")
    (task,) = load_tasks(tmp_path / "out/train.jsonl")
    assert (await check_task(sandbox, task, LIMITS)).problems == ()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("execution_result_content", {"old_commit_res_stdout": "none"}, "old_commit_res_stdout holds no summary"),
        ("execution_result_content", {"test_file_codes": []}, "field 'test_file_codes' is empty"),
        ("execution_result_content", {"test_file_names": ["a.py", "b.py"]}, "2 test_file_names, 1 test_file_codes"),
        ("expected_output_json", {"test_more": "PASSED"}, "disagree, first about 'test_more'"),
        ("parsed_commit_content", {"file_diffs": []}, "changes nothing besides tests"),
        ("parsed_commit_content", {"file_diffs": [{}]}, "has no header.file.path"),
    ],
)
def test_r2e_is_refused_by_the_name_of_its_field(r2e, tmp_path, field, change, message):
    broken = {**r2e, field: json.dumps({**json.loads(r2e[field]), **change})}
    with pytest.raises(BadFile, match=message):
        convert("r2e", write(tmp_path / "raw.jsonl", [broken]), tmp_path / "out", Places())
