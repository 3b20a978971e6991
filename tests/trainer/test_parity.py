"""Every algorithm that verl has too gives verl's own numbers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.deep, pytest.mark.torch]
ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PENSTOCK_PARITY", ROOT / ".venv-parity"))


@pytest.mark.skipif(not (FOLDER / "complete").exists(), reason="no verl: run scripts/setup-parity")
def test_the_largest_difference_from_verl() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [ROOT / "scripts/parity", "--json"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    page = (ROOT / "docs/extend/algorithm.md").read_text()
    table = re.findall(r"^\| ([\w, ]+) \| [^|]+ \| \de[+-]\d\d \|$", page, re.MULTILINE)
    assert table == list(found["largest_difference"]), (
        "the table in docs/extend/algorithm.md has every comparison, in order"
    )
    too_large = {name: value for name, value in found["largest_difference"].items() if not value <= found["goal"]}
    assert too_large == {}
    assert done.returncode == 0
