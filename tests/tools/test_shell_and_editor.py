from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.sandbox import Sandbox, SandboxConfig, SandboxLost, make_sandbox
from penstock.tools import BaseTool, EpisodeBox, ToolConfig, ToolConfigError, ToolInfraError, make_tools, sharing
from penstock.transfer_queue import Task

pytestmark = pytest.mark.bwrap
TASK = Task("train/00000001", "train", [], "tests", None)


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig(max_boxes=2, run_timeout_s=60.0), "tests-shell")
    yield made
    await made.close()


class ShellEpisode:
    """`shell` and `editor` as one episode has them."""

    def __init__(self, tools: dict[str, BaseTool]) -> None:
        self.tools = tools
        self.states: dict[str, EpisodeBox] = {}

    async def open(self) -> ShellEpisode:
        with sharing({}):
            self.states = {name: await tool.create(TASK) for name, tool in self.tools.items()}
        return self

    async def shell(self, command: str) -> str:
        return (await self.tools["shell"].execute(self.states["shell"], {"command": command})).text

    async def python(self, code: str) -> str:
        return (await self.tools["python"].execute(self.states["python"], {"code": code})).text

    async def edit(self, command: str, path: str, **arguments: Any) -> str:
        call = {"command": command, "path": path, **arguments}
        return (await self.tools["editor"].execute(self.states["editor"], call)).text

    async def close(self) -> None:
        for name, tool in self.tools.items():
            await tool.release(self.states[name])


def tools_of(sandbox: Sandbox, timeout_s: float = 60.0) -> dict[str, BaseTool]:
    return make_tools([ToolConfig(name=name, timeout_s=timeout_s) for name in ("shell", "editor", "python")], sandbox)


@pytest_asyncio.fixture
async def episode(sandbox: Sandbox) -> AsyncIterator[ShellEpisode]:
    made = await ShellEpisode(tools_of(sandbox)).open()
    yield made
    await made.close()


async def test_box_tools_shell_takes_up_where_the_last_call_stopped(episode: ShellEpisode) -> None:
    assert (
        await episode.shell("mkdir -p 'a b' && cd 'a b' && X='1 2' && export Y=3; f() { echo f$1; }") == "(no output)"
    )
    assert await episode.shell('pwd; echo "$X $Y"; f 4') == "/tmp/a b\n1 2 3\nf4"
    assert await episode.shell("echo out; echo err >&2; echo last; exit 3") == "out\nerr\nlast\n[exit status 3]"
    assert await episode.shell('echo "still $X"') == "still 1 2"
    assert "No such file" in await episode.shell("cat nothing")
    assert "syntax error" in await episode.shell("if then")
    assert await episode.shell("cat") == "(no output)"


async def test_shell_command_past_its_time_keeps_the_box(sandbox: Sandbox) -> None:
    episode = await ShellEpisode(tools_of(sandbox, timeout_s=8.0)).open()
    await episode.shell("X=1; echo kept > file")
    text = await episode.shell("sleep 60")
    assert text == "Error: the command ran longer than it may and was stopped."
    assert await episode.shell("cat file; echo $X") == "kept\n1"
    await episode.close()


async def test_box_tools_share_a_box_that_the_last_one_closes(episode: ShellEpisode, sandbox: Sandbox) -> None:
    assert await episode.edit("create", "src/main.py", text="print('hi')\n") == "created src/main.py (1 lines)"
    assert await episode.shell("python3 src/main.py") == "hi"
    assert await episode.edit("view", ".") == "src/"
    box = episode.states["shell"]
    assert box is episode.states["editor"]
    session_id = box.session_id
    assert session_id is not None
    await episode.tools["shell"].release(box)
    assert "main.py" in await episode.edit("view", "src")
    await episode.tools["editor"].release(box)
    await episode.tools["python"].release(box)
    with pytest.raises(SandboxLost):
        await sandbox.attach(session_id)
    box.take().take().take()


async def test_box_tools_share_files_with_python(episode: ShellEpisode) -> None:
    await episode.edit("create", "helper.py", text="def double(n):\n    return 2 * n\n")
    assert await episode.python("import sys; sys.path.insert(0, '.'); import helper; helper.double(21)") == "42"
    await episode.python("x = 5; open('made.txt', 'w').write('by python'); None")
    assert await episode.shell("cat made.txt") == "by python"
    assert await episode.shell("cd / && sleep 0") == "(no output)"
    assert await episode.python("x") == "5"
    assert episode.states["python"] is episode.states["shell"]


async def test_box_tools_python_brings_no_shared_box_back_by_itself(episode: ShellEpisode) -> None:
    """Its own code would run again without the files that the others wrote."""
    await episode.shell("echo data > file")
    await episode.python("x = 1")
    await (await episode.states["python"].session()).close()
    with pytest.raises(ToolInfraError, match="closed"):
        await episode.python("x")


async def test_box_tools_another_worker_goes_on_in_box_and_can_undo(episode: ShellEpisode) -> None:
    await episode.edit("create", "f", text="a\n")
    await episode.shell("cd /tmp && X=7")
    session_id = episode.states["shell"].session_id or ""
    other = ShellEpisode(episode.tools)
    with sharing({}):
        other.states = {name: await tool.attach(TASK, session_id) for name, tool in other.tools.items()}
    assert await other.shell("echo $X") == "7"
    assert await other.edit("undo", "f") == "removed f, which create had made"
    assert await other.edit("view", "f") == "Error: f was not found"


async def test_box_tools_lost_box_is_infrastructure(episode: ShellEpisode) -> None:
    await episode.shell("true")
    await (await episode.states["shell"].session()).close()
    with pytest.raises(ToolInfraError, match="closed"):
        await episode.shell("true")
    with pytest.raises(SandboxLost):
        await episode.tools["shell"].attach(TASK, "no-such-session")


async def test_box_tools_view_shows_numbers_ranges_and_folders(episode: ShellEpisode) -> None:
    await episode.edit("create", "f", text="".join(f"line {n}\n" for n in range(1, 101)))
    assert await episode.edit("view", "./f", lines=[99, -1]) == "    99\tline 99\n   100\tline 100"
    assert (await episode.edit("view", "f")).count("\n") == 99
    assert await episode.edit("view", "f", lines=[90, 500]) == await episode.edit("view", "f", lines=[90, 100])
    for lines in ([0, 5], [5, 4], [101, 102]):
        assert "it has 100 lines" in await episode.edit("view", "f", lines=lines)
    assert await episode.edit("view", "/tmp") == "f"


async def test_editor_replace_names_what_does_not_fit(episode: ShellEpisode) -> None:
    text = "def f():\n    return 1\n\ndef g():\n    return 1\n"
    await episode.edit("create", "f.py", text=text)
    assert await episode.edit("replace", "f.py", old_text="return 1", text="return 2") == (
        "Error: old_text is not unique in f.py: it occurs 2 times, at lines 2, 5. Give more of the lines around it"
    )
    assert (
        await episode.edit("replace", "f.py", old_text="return 3", text="x") == "Error: old_text was not found in f.py"
    )
    assert await episode.edit("replace", "f.py", old_text="def f():\n  return 1", text="x") == (
        "Error: old_text was not found in f.py; at line 1 it differs in white space only: copy it exactly"
    )
    assert "is empty" in await episode.edit("replace", "f.py", old_text="", text="x")
    assert "nothing would change" in await episode.edit("replace", "f.py", old_text="x", text="x")
    assert await episode.edit("replace", "f.py", text="x") == "Error: replace needs old_text"
    assert await episode.edit("replace", "none.py", old_text="a", text="b") == "Error: none.py was not found"
    assert await episode.shell("cat f.py") == text.rstrip()
    assert await episode.edit("replace", "f.py", old_text="g():\n    return 1", text="g():\n    return 2") == (
        "f.py now reads:\n     1\tdef f():\n     2\t    return 1\n     3\t\n     4\tdef g():\n     5\t    return 2"
    )


async def test_editor_counts_lines_as_grep_does(episode: ShellEpisode) -> None:
    """A form feed, as old sources have between their parts, and Unicode's own line ends are parts of a line."""
    await episode.edit("create", "f.py", text="a\x0c\nb\u2028\r\nc\n")
    assert await episode.shell("grep -n c f.py") == "3:c"
    assert await episode.edit("view", "f.py", lines=[2, 3]) == "     2\tb\u2028\n     3\tc"
    await episode.edit("insert", "f.py", line=2, text="new")
    assert (await episode.shell("cat f.py")).encode() == "a\x0c\nb\u2028\r\nnew\nc".encode()


async def test_box_tools_insert_at_the_top_the_end_and_beyond(episode: ShellEpisode) -> None:
    await episode.shell("printf 'a\\nb' > f")
    await episode.edit("insert", "f", line=2, text="c")
    await episode.edit("insert", "f", line=0, text="top\n")
    assert await episode.shell("cat f") == "top\na\nb\nc"
    assert await episode.edit("insert", "f", line=9, text="x") == (
        "Error: line 9 is not in f: it has 4 lines (0 inserts at the top)"
    )


async def test_editor_undo_is_stepwise_and_keeps_others_changes(episode: ShellEpisode) -> None:
    await episode.edit("create", "f", text="1\n")
    await episode.edit("replace", "f", old_text="1", text="2")
    await episode.edit("insert", "f", line=1, text="3")
    assert await episode.edit("undo", "f") == "undone: the last edit of f"
    assert await episode.shell("cat f") == "2"
    await episode.edit("undo", "f")
    assert await episode.shell("cat f") == "1"
    await episode.edit("undo", "f")
    assert await episode.edit("undo", "f") == "Error: there is no edit of f to undo"
    await episode.edit("create", "f", text="1\n")
    await episode.shell("echo more >> f")
    assert "changed since by something else" in await episode.edit("undo", "f")
    assert await episode.shell("cat f") == "1\nmore"
    await episode.shell("echo 1 > f")
    assert await episode.edit("undo", "f") == "removed f, which create had made", "the refusal kept the edit"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("head -c 2000000 /dev/zero > f", "larger than"),
        ("printf '\\377\\376' > f", "not UTF-8"),
        ("mkfifo f", "cannot be read"),
        ("ln -s /etc/shadow f", "cannot be read|Permission denied|was not found"),
        ("ln -s f f", "Too many"),
    ],
)
async def test_box_tools_files_that_are_no_text_are_named(episode: ShellEpisode, make: str, message: str) -> None:
    import re

    await episode.shell(make)
    text = await episode.edit("view", "f")
    assert text.startswith("Error: ")
    assert re.search(message, text), text


async def test_box_tools_odd_paths_and_texts_are_answered(episode: ShellEpisode) -> None:
    for path in ("", "\0", "x" * 5000, "/proc/1/mem", "/usr/new", "../../etc/passwd2"):
        assert (await episode.edit("create", path, text="x")).startswith("Error: "), path
    assert (await episode.edit("create", "f", text="\ud800")).startswith("Error: text holds")
    assert await episode.edit("view", "f") == "Error: f was not found"


def test_box_tools_both_need_a_sandbox() -> None:
    for name in ("shell", "editor"):
        with pytest.raises(ToolConfigError, match=f"tool {name} needs a sandbox"):
            make_tools([ToolConfig(name=name)], None)


async def test_box_tools_first_calls_of_both_at_once_open_one_box(episode: ShellEpisode) -> None:
    await asyncio.gather(episode.shell("echo 1 > a"), episode.edit("create", "b", text="2"))
    assert await episode.shell("cat a b") == "1\n2"
