import pytest

from penstock.transfer_queue import Status, evaluation_split, under_evaluation


@pytest.mark.parametrize(
    ("splits", "busy"),
    [
        ({}, False),
        ({"eval/4": {"queued": 1, "leased": 0, "done": 0}}, True),
        ({"eval/4": {"queued": 0, "leased": 1, "done": 3}}, True),
        ({"eval/4": {"queued": 0, "leased": 0, "done": 4}}, False),
        ({"eval/3": {"queued": 1}}, True),
        ({"eval/5": {"queued": 1}}, False),
        ({"eval/5": {"queued": 1}, "eval/2": {"leased": 1}}, True),
        ({"by hand": {"queued": 1}}, True),
        ({"eval/best": {"queued": 1}}, True),
    ],
)
def test_which_splits_a_server_at_version_4_is_needed_by(splits: dict[str, dict[str, int]], busy: bool) -> None:
    assert under_evaluation(Status(9, 9, 9, {}, {}, 0, {}, {}, other_splits=splits), 4) == busy


def test_a_split_is_named_after_its_version() -> None:
    assert evaluation_split(12) == "eval/12"
