"""Sandbox servers are started as the benchmarks start them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for benchmarks.support
