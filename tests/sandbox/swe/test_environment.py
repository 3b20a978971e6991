"""A repository placed, worked on and turned into a patch, in real boxes."""

from __future__ import annotations

import dataclasses

import pytest
from tests.sandbox.swe.conftest import LIMITS
from tests.sandbox.swe.wordkit import BASE, git

from penstock.sandbox.swe import PatchError, SweEnvironment, SweLimits, SweTaskError

pytestmark = pytest.mark.bwrap
LISTING = (
    "find . -path ./.git -prune -o -type f -printf '%m ' -exec sha256sum {} \\; ; "
    "find . -path ./.git -prune -o -type l -printf '%p -> %l\\n'"
)
"""Every file with its permissions and content, every link with its target."""


async def listing(environment: SweEnvironment) -> list[str]:
    result = await environment.run(LISTING)
    assert result.exit_code == 0, result.stderr
    return sorted(line for line in result.stdout.splitlines() if "__pycache__" not in line)


async def shell(environment: SweEnvironment, command: str) -> str:
    result = await environment.run(command)
    assert result.exit_code == 0, result.stderr
    return result.stdout


async def test_environment_snapshot_is_the_commit_byte_for_byte(any_sandbox, task):
    environment = await SweEnvironment.open(any_sandbox, task, LIMITS)
    for name, text in BASE.items():
        assert await environment.session.read_file(f"{environment.folder}/{name}") == text.encode(), name
    assert await shell(environment, "git status --short; git log --format='%an %s'; test -x run.sh; readlink link") == (
        "snapshot snapshot\nREADME.md\n"
    )
    assert await environment.diff() == b""
    again = await SweEnvironment.open(any_sandbox, task, LIMITS)
    assert await shell(environment, "git rev-parse HEAD") == await shell(again, "git rev-parse HEAD")


async def test_environment_nothing_of_the_future_can_be_found(any_sandbox, task, repository):
    everything = "git {} cat-file --batch-all-objects --batch --unordered"
    future = git(repository, "cat-file", "--batch-all-objects", "--batch", "--unordered")
    assert "sep.join(words)" in future
    assert "takes_a_separator" in future
    environment = await SweEnvironment.open(any_sandbox, task, LIMITS)
    state = environment.folder.rpartition("/")[0] + "/.penstock_swe/base.git"
    for option in ("", f"--git-dir={state}"):
        objects = await shell(environment, everything.format(option))
        assert '"-".join(words)' in objects
        for trace in ("sep.join(words)", "takes_a_separator", "fix wordkit", "words and sums"):
            assert trace not in objects
        told = await shell(environment, f"git {option} fsck --lost-found --unreachable 2>&1")
        assert "unreachable" not in told
        assert "dangling" not in told
        assert await shell(environment, f"git {option} for-each-ref --format='%(refname)'") == "refs/heads/main\n"
        assert await shell(environment, f"git {option} rev-list --all --count") == "1\n"
        assert await shell(environment, f"git {option} reflog; git {option} remote; git {option} stash list") == ""
    found = await environment.run(
        "grep -rl --binary-files=text -e 'sep.join(words)' -e takes_a_separator /tmp /var 2>/dev/null"
    )
    assert found.stdout == ""


CHANGES = r"""
printf '\000\001\377new' > data/table.dat
printf 'more\r\nends\n' >> data/words.txt
rm README.md
chmod -x run.sh
ln -sfn wordkit link
mkdir -p new/deep && printf 'x' > 'new/deep/no newline' && : > new/empty
printf 'a\n' > "$(printf 'new/quote"tab\there \303\244')"
printf '\211PNG\000\r\n' > new/image.png
echo changed > build/pinned.cfg
echo out > build/out.txt; echo log > run.log; echo kept > kept.log
rm -r tests && echo 'a file now' > tests
rm wordkit/money.py && mkdir wordkit/money.py && echo 1 > wordkit/money.py/__init__.py
mkdir nested && git -C nested init -q && echo n > nested/n
"""
AFTERWARDS = {
    "left": "true",
    "committed": "git checkout -q -b mine && git add -A . ':!nested' && git commit -qm i && echo 1 >> wordkit/slug.py",
    "staged": "git add -A . ':!nested'",
    "git destroyed": "rm -rf .git; git init -q; git add wordkit; git -c user.name=a -c user.email=b commit -qm 1",
    "git bent": "git config diff.noprefix true; git config core.autocrlf true; echo '*' > /tmp/all; "
    "git config --global core.excludesFile /tmp/all",
}


@pytest.mark.parametrize("then", AFTERWARDS)
async def test_environment_patch_reproduces_the_models_tree(sandbox, task, then):
    worked = await SweEnvironment.open(sandbox, task, LIMITS)
    await shell(worked, CHANGES + AFTERWARDS[then])
    patch = await worked.diff()
    assert await worked.diff() == patch
    fresh = await SweEnvironment.open(sandbox, task, LIMITS)
    await fresh.apply(patch)
    ignored = ("build/out.txt", "run.log", "nested/")
    assert await listing(fresh) == [line for line in await listing(worked) if not any(name in line for name in ignored)]
    for name in ignored:
        assert name.encode() not in patch
    assert b"kept.log" in patch
    assert b"build/pinned.cfg" in patch


async def test_environment_patch_that_does_not_fit_changes_nothing(sandbox, task):
    environment = await SweEnvironment.open(sandbox, task, LIMITS)
    await environment.apply(task.patch)
    before = await environment.diff()
    with pytest.raises(PatchError, match=r"slug\.py"):
        await environment.apply(task.patch)
    for wrong in (b"no patch at all\n", b"--- a/../../up\n+++ b/../../up\n@@ -0,0 +1 @@\n+x\n"):
        with pytest.raises(PatchError):
            await environment.apply(wrong)
    assert await environment.diff() == before
    await environment.apply(b"")


async def test_environment_what_is_too_large_or_destroyed_is_no_patch(sandbox, task):
    limits = SweLimits(**{**LIMITS.model_dump(), "patch_bytes": 2000})
    environment = await SweEnvironment.open(sandbox, task, limits)
    await shell(environment, "head -c 100000 /dev/urandom > blob")
    with pytest.raises(PatchError, match="larger than 2000 bytes"):
        await environment.diff()
    await shell(environment, "rm -rf /tmp/.penstock_swe")
    with pytest.raises(PatchError, match="no patch can be made"):
        await environment.diff()


async def test_environment_another_process_goes_on_in_the_box(sandbox, task):
    first = await SweEnvironment.open(sandbox, task, LIMITS)
    await shell(first, "echo mine > new")
    second = await SweEnvironment.around(await sandbox.attach(first.session.session_id), task, LIMITS)
    assert b"+mine" in await second.diff()


async def test_environment_plain_files_are_a_repository_too(sandbox, task, tmp_path):
    (tmp_path / "a").write_text("a\n")
    (tmp_path / "a.log").write_text("ignored by nobody\n")
    plain = dataclasses.replace(task, repository=tmp_path, base_commit=None, build_command="echo $((6 * 7)) > built")
    environment = await SweEnvironment.open(sandbox, plain, LIMITS)
    assert await shell(environment, "git ls-files; cat built") == "a\na.log\n42\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_commit": "0" * 40}, "repository"),
        ({"build_command": "echo no compiler; exit 3"}, "no compiler"),
        ({"folder": "/usr/repo"}, "cannot be made"),
    ],
)
async def test_environment_setup_failure_names_the_cause(sandbox, task, fields, message):
    for _ in range(5):  # one more than there are boxes
        with pytest.raises(SweTaskError, match=message):
            await SweEnvironment.open(sandbox, dataclasses.replace(task, **fields), LIMITS)
