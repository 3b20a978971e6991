import pytest

from penstock.datasets import BadExpression, canonical, evaluate, printed
from penstock.datasets.arithmetic import in_range


@pytest.mark.parametrize(
    ("text", "value"),
    [("48/2", 24.0), ("4821*307", 1480047), ("2*(3+2)", 10), ("-20+10", -10), ("71+-3", 68), ("0.1+0.2", 0.1 + 0.2)],
)
def test_evaluates_as_python_does(text: str, value: float) -> None:
    assert evaluate(text) == value
    assert type(evaluate(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    ["", "1/0", "2**9999999", "7//2", "__import__('os')", "1+", "(1", "05+1", "1_000", "1e5", "a", "1,2", "9" * 201],
)
def test_refuses_what_is_not_arithmetic(text: str) -> None:
    with pytest.raises(BadExpression):
        evaluate(text)


def test_a_huge_quotient_is_refused_not_raised_through() -> None:
    with pytest.raises(BadExpression):
        evaluate("9" * 90 + "*" + "9" * 90 + "/3" + "*1.5" * 2 + "0" * 2 + "/0")


def test_one_spelling() -> None:
    assert canonical(" .5 * 10.5") == "0.5*10.5"
    assert canonical("2-.5+.25") == "2-0.5+0.25"


def test_prints_as_the_tool_prints() -> None:
    assert printed(evaluate("10/3")) == "3.3333"
    assert printed(evaluate("48/2")) == "24.0"
    assert printed(evaluate("0.1+0.2")) == "0.3"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("4821*307", True),
        ("1+2+3+4", True),
        ("1+2+3+4+5", False),
        ("5", False),
        ("-5+3", False),
        ("4*-5", False),
        ("123456*2", True),
        ("1234567*2", False),
        ("999999*999999", False),
        ("5/0", False),
    ],
)
def test_range(text: str, inside: bool) -> None:
    assert in_range(text) is inside
