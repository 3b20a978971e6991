"""The chart rendered by Helm's own library, with no cluster and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: pip install 'penstock[dev]'")

CHART = Path(__file__).parents[4] / "deploy" / "placements" / "kubernetes"
Objects = dict[tuple[str, str], dict[str, Any]]
"""(kind, name) → document."""


class ChartRefused(Exception):
    """Helm took the values for wrong."""


def render(values: dict[str, Any], release: str = "mine") -> Objects:
    """Raises `ChartRefused` where the values do not fit the chart's schema."""
    chart = helm.Chart.load(CHART)
    try:
        chart.validate_schema(values)
    except helm.HelmError as error:
        raise ChartRefused(str(error)) from error
    files = chart.render(values, name=release, namespace="training", is_install=True)
    documents = [d for name, text in files.items() if name.endswith(".yaml") for d in yaml.safe_load_all(text) if d]
    objects = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(objects) == len(documents), "two documents have one name"
    return objects
