"""Test cases in verl's and PRIME's shapes, and which outputs pass."""

from __future__ import annotations

import json

import pytest

from penstock.agent_loops.rewards.programs import BadCases, program_of, read_cases, same_text, same_value


def test_stdin_cases() -> None:
    cases = read_cases(json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7", ""]]}))
    assert [(case.kind, case.input, case.expected) for case in cases] == [
        ("stdin", "1 2\n", "3\n"),
        ("stdin", "3\n4", "7\n"),
    ]


def test_call_cases() -> None:
    given = {"fn_name": "add", "inputs": ["[1, 2]\n3", [4, 5]], "outputs": ["[6]", 9]}
    cases = read_cases(given)
    assert [case.input for case in cases] == [
        {"name": "add", "arguments": [[1, 2], 3]},
        {"name": "add", "arguments": [4, 5]},
    ]
    assert [case.expected for case in cases] == [[6], 9]
    assert cases[0].passes([6])
    assert cases[0].passes(6)
    assert not cases[0].passes(7)


def test_assertions_of_verl_and_a_plain_list() -> None:
    verl = {"inputs": ["", ""], "outputs": [None, None], "assert_case": ["assert f(1)", "assert f(2)"]}
    for given in (verl, ["assert f(1)", "assert f(2)"]):
        assert [(case.kind, case.input) for case in read_cases(given)] == [
            ("assert", "assert f(1)"),
            ("assert", "assert f(2)"),
        ]
    assert read_cases(verl)[0].passes([1])
    assert not read_cases(verl)[0].passes([0])
    assert not read_cases(verl)[0].passes(True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("assert", "not Python"),
        ("f(1)", "asserts nothing"),
        ("assert sum([1]) == 1", "calls nothing of the program"),
        ("assert f(1) == f(2)", "both sides"),
        ("assert g(x == 1)", "inside the box"),
        ("assert isclose(f(1), 0.5)", "answer in place"),
        ("assert np.allclose(f(1), [0.5]) == True", "answer in place"),
        ("good = f(1) == 1\nassert good", "inside the box"),
        ("good = isclose(f(1), 1)\nassert good", "answer in place"),
        ("assert all(f(i) == i for i in range(3))", "GeneratorExp"),
        ("assert f(1) * 9 == 9", "take for ever"),
        ("assert f(1).startswith('ab')", "answer in place"),
        ("x = f(1)\nassert x.issubset({1, 2}) == True", "answer in place"),
        ("assert f(1).__eq__(2)", "answer in place"),
        ("assert isinstance(f(1), Node)", "class of the program"),
        ("def check(f): assert f(1) == 1\ncheck(f)", "FunctionDef"),
    ],
)
def test_assertions_refused(text: str, reason: str) -> None:
    with pytest.raises(BadCases, match=reason):
        read_cases([text])


@pytest.mark.parametrize(
    ("text", "output", "holds"),
    [
        ("assert f() == (1, 2)", {"tuple": [1, 2]}, True),
        ("assert f() == (1, 2)", {"list": [1, 2]}, False),
        ("assert f() == {1: b'x'}", {"dict": [[1, {"bytes": "78"}]]}, True),
        ("assert f() is not None", {"object": "Node"}, True),
        ("assert f() == 3 ** 2 or 3", {"object": "Node"}, True),
        ("assert 1 < f() <= 2", 2, True),
        ("assert 1 < f() <= 2", "2", False),
        ("assert math.isclose(f(), 0.3, rel_tol=1e-9)", 0.1 + 0.2, True),
        ("assert f() == {1}", {"set": [{"list": []}]}, False),
        ("assert f() == {1}", {"set": 3, "list": []}, False),
    ],
)
def test_assertions_compared(text: str, output: object, holds: bool) -> None:
    (case,) = read_cases([text])
    assert case.passes([output]) is holds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("not json", "no JSON"),
        ("3", "a mapping or a list"),
        ({}, "inputs, outputs and assert_case are empty"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"}, "one JSON value per line"),
    ],
)
def test_what_is_no_test_case_is_said(given: object, message: str) -> None:
    with pytest.raises(BadCases, match=message):
        read_cases(given)


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2  \n3\n\n", "1 2\n3\n", True),
        ("1\n2\n3", "1 2\n3", False),
        ("0.3000000001", "0.3", True),
        ("0.31", "0.3", False),
        ("3.0", "3", True),
        ("100000", "100001", False),
        ("nan", "0.5", False),
        ("", "", True),
        ("x", "", False),
    ],
)
def test_printed_text(given: str, expected: str, same: bool) -> None:
    assert same_text(given, expected) is same


def test_returned_values() -> None:
    assert same_value([1, [2, 3]], [1, [2, 3]])
    assert same_value(0.1 + 0.2, 0.3)
    assert not same_value([1, 2], [2, 1])
    assert not same_value(None, [1])


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("First\n```python\na = 1\n```\nthen\n```python\nb = 2\n```\nDone.", "b = 2\n"),
        ("```\nc = 3\n```", "c = 3\n"),
        ("```python\nd = 4\n```\nIt prints\n```text\n4\n```", "d = 4\n"),
        ("```cpp\nint e;\n```", ""),
        ("<think>```python\nwrong\n```</think>print(1)", "print(1)"),
        ("```python\ncut = 1", "cut = 1"),
        ("print(5)", "print(5)"),
    ],
)
def test_which_text_is_the_program(text: str, program: str) -> None:
    assert program_of(text) == program
