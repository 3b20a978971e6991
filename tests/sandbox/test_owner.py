"""The name of a machine: clones of a snapshot have one boot id, and must not judge each other's processes."""

from __future__ import annotations

import pytest

from penstock.sandbox.managed.labels import box_labels, is_abandoned

OF_ENDED_PROCESS = {"penstock-process": "4194304-1"}  # no pid is so large


@pytest.mark.parametrize(
    ("what", "value"), [("socket.gethostname", "clone-2"), ("network_addresses", ["52:54:00:00:00:02"])]
)
def test_clone_of_a_machine_judges_no_process_of_another_clone(
    monkeypatch: pytest.MonkeyPatch, what: str, value: object
) -> None:
    monkeypatch.setattr("penstock.sandbox.owner.socket.gethostname", lambda: "clone")
    monkeypatch.setattr("penstock.sandbox.owner.network_addresses", lambda: ["52:54:00:00:00:01"])
    labels = {**box_labels("run", "session", "request", 600.0), **OF_ENDED_PROCESS}
    assert is_abandoned(labels), "one that has the same of all is the same machine"
    monkeypatch.setattr(f"penstock.sandbox.owner.{what}", lambda: value)
    assert not is_abandoned(labels)
