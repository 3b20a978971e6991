"""Names of metrics: one style, a table that says what there is, and a board that asks for nothing else."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.telemetry.exporters import Family, exporters

ROOT = Path(__file__).parents[3]
BOARD = ROOT / "deploy" / "grafana" / "penstock.json"
TARGET_LABELS = {"run", "role", "name", "job", "instance"}
"""Those that Prometheus adds, from prometheus-targets.json and by itself."""
ROW = re.compile(r"^\| `(penstock_\w+)` \| (\w+) \|\s*(.*?)\s*\|\s*(.*?)\s*\| .+ \|$", re.MULTILINE)


def exposed() -> dict[str, Family]:
    return {name: family for families in exporters().values() for name, family in families.items()}


def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def test_the_table_is_what_the_roles_expose() -> None:
    table = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), frozenset(re.findall(r"\w+", roles)))
        for name, kind, labels, roles in ROW.findall((ROOT / "docs/guide/monitoring.md").read_text())
    }
    roles: dict[str, set[str]] = {}
    for role, families in exporters().items():
        for name in families:
            roles.setdefault(name, set()).add(role)
    real = {name: (one.kind, one.labels, frozenset(roles[name])) for name, one in exposed().items()}
    assert table == real


def test_names_have_one_style() -> None:
    for name, family in exposed().items():
        assert re.fullmatch(r"penstock_[a-z][a-z_]*[a-z]", name), name
        assert name.endswith("_total") == (family.kind == "counter"), name
        if family.kind == "histogram":
            assert name.endswith("_seconds"), f"{name}: say the unit"
        assert not name.endswith(("_s", "_ms", "_sec")), f"{name}: units are written out"


# the board -----------------------------------------------------------------------------------------------------------
def parsed(expression: str) -> Any:
    promql = pytest.importorskip("promql_parser")
    return promql.parse(expression.replace("$__rate_interval", "5m").replace("$run", "mine"))


def selectors(node: Any) -> list[Any]:
    """Every vector selector of a parsed expression."""
    if type(node).__name__ == "VectorSelector":
        return [node]
    inner = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param")]
    listed = [one for child in inner if child is not None for one in (child if isinstance(child, list) else [child])]
    return [found for child in listed for found in selectors(child)]


def test_every_expression_parses_and_names_only_what_exists() -> None:
    families = exposed()
    by_sample = {sample: family for family in families.values() for sample in family.samples}
    asked = 0
    for title, expression in ((one["title"], target["expr"]) for one in panels() for target in one["targets"]):
        for selector in selectors(parsed(expression)):
            asked += 1
            where = f"{title}: {selector.name}"
            assert selector.name == "up" or selector.name in by_sample, where
            known = TARGET_LABELS | (by_sample[selector.name].labels if selector.name != "up" else set())
            used = {matcher.name for matcher in selector.matchers.matchers} - {"le"}
            assert used <= known, f"{where} has no label {used - known}"
    assert asked >= len(panels())


def test_the_board_asks_about_every_role_and_legends_name_labels_of_their_expression() -> None:
    text = BOARD.read_text()
    assert [role for role, families in exporters().items() if not any(name in text for name in families)] == []
    for panel in panels():
        for target in panel["targets"]:
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.search(r"\bby \(([\w, ]+)\)", target["expr"])
            if kept:
                assert used <= {label.strip() for label in kept[1].split(",")}, (panel["title"], used)


def test_the_board_is_one_that_grafana_can_draw() -> None:
    made = board()
    assert made["schemaVersion"] >= 36
    assert (made["uid"], made["title"]) == ("penstock", "Penstock")
    variables = {one["name"] for one in made["templating"]["list"]}
    assert variables == {"datasource", "run"}
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) >= 1
    for one, other in itertools.combinations([panel["gridPos"] for panel in made["panels"]], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in made["panels"])


def test_the_prometheus_example_finds_what_a_run_writes() -> None:
    (job,) = yaml.safe_load((BOARD.parent / "prometheus.yml").read_text())["scrape_configs"]
    (discovery,) = job["file_sd_configs"]
    (path,) = discovery["files"]
    assert path.endswith("/prometheus-targets.json")
    assert "*" not in path.rpartition("/")[0], "Prometheus takes wildcards in the last part of a path alone"
    assert job["authorization"]["credentials_file"].endswith("/metrics.token")
    assert job["honor_labels"] is True
