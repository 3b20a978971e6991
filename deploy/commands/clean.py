"""`penstock clean`."""

from __future__ import annotations


def clean() -> None:
    """Remove what killed runs of this user left in this machine's shared memory; living runs keep theirs.

    A start of a run does so too. Needed after a run and its supervisor were killed at once (SIGKILL, out of memory).

    Example: penstock clean
    """
    from penstock.deploy.weights_folder import SHARED_MEMORY, living_folders, remove_abandoned

    removed = remove_abandoned()
    for folder in removed:
        print(f"removed {folder.path} ({folder.bytes / 1e6:.0f} MB): no run uses it")
    for path in living_folders():
        print(f"kept {path}: its run lives")
    if not removed:
        print(f"nothing of a killed run in {SHARED_MEMORY}")
