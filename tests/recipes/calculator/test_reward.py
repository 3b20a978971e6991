import pytest
from tests.recipes.conftest import script

reward = script("calculator/reward.py")

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(48/2)"}}\n</tool_call>'
RESPONSE = "\nuser\n<tool_response>\n24.0\n</tool_response>\nassistant\n"


def score(text: str, truth: object = "24.0", **extra: object) -> float:
    return reward.compute_score("calculator", text, truth, extra)


@pytest.mark.parametrize(
    "text", ["24", "24.0", "48/2 = 24.", "It is $24.00<|im_end|>", "24.00004", CALL + RESPONSE + "24.0"]
)
def test_right(text: str) -> None:
    assert score(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "25", "24.001", "24 or 25", "-24", "24" * 3000, "1e999", "\x00", "٢٤", "24,5,", "</tool_response>"),
        *(CALL, CALL + RESPONSE, CALL + RESPONSE + CALL, CALL + RESPONSE + "<tool_call>24"),
    ],
)
def test_wrong_and_never_raises(text: str) -> None:
    assert score(text) == 0.0


def test_the_workers_final_text_is_preferred() -> None:
    assert score("24", final_text="the model said nothing") == 0.0
    assert score("25", final_text="24") == 1.0
    assert score(CALL, final_text=CALL + "24") == 0.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [("-3741", "-3741"), ("8600-12341=-3741", -3741), ("1,480,047", "1480047"), (".5", 0.5), ("3.3333", repr(10 / 3))],
)
def test_numbers_as_models_write_them(text: str, truth: object) -> None:
    assert score(text, truth) == 1.0


def test_an_estimate_of_a_large_product_earns_nothing() -> None:
    assert score("1480000", "1480047") == 0.0


def test_a_broken_row_is_no_zero() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        score("24", "twenty-four")
