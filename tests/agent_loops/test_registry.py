from __future__ import annotations

import pytest

from penstock.agent_loops import AgentLoopBase, LoadError, find_loop, register
from penstock.agent_loops.loops import ToolAgentLoop
from penstock.agent_loops.loops.single_turn import SingleTurnLoop


def test_loops_in_the_box_have_names(tmp_path):
    assert find_loop("tool_agent", tmp_path) is ToolAgentLoop
    assert find_loop("single_turn", tmp_path) is SingleTurnLoop


@pytest.mark.parametrize(
    "spec", ["penstock.agent_loops.loops:ToolAgentLoop", "penstock.agent_loops.loops.ToolAgentLoop"]
)
def test_a_class_is_found_by_dotted_path(spec, tmp_path):
    assert find_loop(spec, tmp_path) is ToolAgentLoop


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tool_agnet", "agent loop 'tool_agnet'; did you mean 'tool_agent'"),
        ("penstock.agent_loops.loops:ToolAgentLop", "has no 'ToolAgentLop'; did you mean 'ToolAgentLoop'"),
        ("penstock.agent_lops:X", "module 'penstock.agent_lops' cannot be imported"),
        ("nowhere.py:X", "no file 'nowhere.py'"),
        ("penstock.agent_loops.config:AgentConfig", "not a subclass of AgentLoopBase"),
        ("penstock.agent_loops.base:AgentLoopBase", "has no `async def run"),
    ],
)
def test_a_wrong_name_is_told_what_is_near(spec, message, tmp_path):
    with pytest.raises(LoadError, match=message):
        find_loop(spec, tmp_path)


def test_a_file_that_does_not_import_names_the_cause(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(LoadError, match=r"broken.py cannot be imported: ModuleNotFoundError"):
        find_loop("broken.py:X", tmp_path)


NEEDY = """
from penstock.agent_loops import AgentLoopBase, LoadError


class Needy(AgentLoopBase):
    async def run(self, task): ...

    @classmethod
    def require(cls):
        raise LoadError("pip install what-it-needs")
"""


def test_a_loop_is_asked_for_what_it_requires(tmp_path):
    (tmp_path / "needy.py").write_text(NEEDY)
    with pytest.raises(LoadError, match="pip install what-it-needs"):
        find_loop("needy.py:Needy", tmp_path)


def test_two_loops_cannot_have_one_name():
    class Other(AgentLoopBase):
        pass

    with pytest.raises(LoadError, match=r"'tool_agent': .*ToolAgentLoop and .*Other"):
        register("tool_agent")(Other)
