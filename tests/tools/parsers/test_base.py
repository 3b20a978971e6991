from __future__ import annotations

from typing import get_args

import pytest
from tests.tools.parsers.families import CODE_FAMILY, FAMILIES, render

from penstock.agent_loops import AgentConfig
from penstock.tools.parsers import ParserName, get_parser

CALL = ("python", {"code": "1"})


@pytest.mark.parametrize("name", get_args(ParserName))
def test_every_name_of_the_setting_is_a_parser_with_marks_that_its_calls_bear(name: str) -> None:
    assert AgentConfig(parser=name).parser == name  # type: ignore[arg-type]
    parser = get_parser(name)
    families = [one for one in [*FAMILIES.values(), CODE_FAMILY] if one.parser == name]
    assert families
    for family in families:
        text = render(family, "", [CALL])
        assert parser.opening in text
        assert parser.closing in text
        whole = parser.parse(text).calls
        assert parser.parse(text[text.find(parser.opening) :]).calls == whole
        assert len(whole) == 1


@pytest.mark.parametrize(("wrong", "near"), [("herms", "hermes"), ("qwen3-coder", "qwen3_coder"), ("glm45", "glm")])
def test_an_unknown_parser_is_named_with_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong!r}; did you mean {near!r}"):
        get_parser(wrong)
