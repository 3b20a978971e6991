"""Which tests stay together when `scripts/test` runs several processes of them, and what it prints."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

# How fast a test's examples are made and run says something about the machine only.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")

# Some millions of objects are made while tests are collected, and none of them is garbage: to look through them takes a
# fifth of that time, and again of each later collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


ROOT = Path(__file__).parent
TOGETHER = (
    ROOT / "rollout_server" / "conformance",  # one running engine of each kind
    ROOT / "recipes" / "swe",  # tasks that are made once
    ROOT / "sandbox" / "attacks",  # one planted host, and the process's descriptors are counted around every attack
)
LONG_S = 1200
"""A test whose deadline is at least so far away may take minutes: begun last, it would run alone at the end."""
OUTCOMES = ("passed", "failed", "error", "skipped")
GREEDIEST = 60
"""So many tests are printed with the processor time they took: on two cores it decides how long all tests take."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = next((folder for folder in TOGETHER if folder in item.path.parents), item.path)
        item.add_marker(pytest.mark.xdist_group(str(folder.relative_to(ROOT))))
    long = {_group(item) for item in items if (limit := item.get_closest_marker("timeout")) and limit.args[0] >= LONG_S}
    items.sort(key=lambda item: _group(item) not in long)


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """xdist says nothing where it has not read the groups: all tests pass, and every engine is started twice."""
    if node.config.getvalue("dist") == "loadgroup" and not all("@" in one for one in ids):
        pytest.exit("xdist has not read the groups of tests: see pytest's range in pyproject.toml", returncode=4)


class FailurePrinter:
    """Prints the name and the error of a failed test at once; pytest alone does so after the last test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[0] if crash is not None and crash.message else report.when
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}: {message}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist has no terminal
        config.pluginmanager.register(FailurePrinter(config), "failure-printer")
    config.pluginmanager.import_plugin("tests.interruption")


_cpu_before = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Adds the processor time of this process and of the children that it has waited for, in seconds.

    A test that ends an engine waits for it: what the engine has used for the tests before it is their area's.
    """
    global _cpu_before
    report = yield
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    now = sum(one.ru_utime + one.ru_stime for one in used)
    ends_engine = call.when == "setup" and item.get_closest_marker("ends_engine")
    report.engine_cpu_s = _cpu_of_children() if ends_engine else 0.0
    report.cpu_s, _cpu_before = now - _cpu_before, now + report.engine_cpu_s
    return report


def _cpu_of_children() -> float:
    """Return the processor time that living children have used, in seconds."""
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per area: its seconds, how its tests ended, and why some were skipped."""
    _print_greediest(terminalreporter)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    reasons: dict[str, set[str]] = defaultdict(set)
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            area = _area(report.nodeid)
            counts[area][outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons[area].add(report.longrepr[2].removeprefix("Skipped: "))
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[_area(report.nodeid)] += report.duration
                # The report of a test that ended its worker has no times.
                cpu[_area(report.nodeid)] += getattr(report, "cpu_s", 0) + getattr(report, "engine_cpu_s", 0)
    if not counts:
        return
    terminalreporter.section("areas")
    for area in sorted(counts):
        numbers = ", ".join(f"{counts[area][outcome]} {outcome}" for outcome in OUTCOMES if counts[area][outcome])
        why = "".join(f"; skipped: {reason}" for reason in sorted(reasons[area]))
        terminalreporter.write_line(f"{area:16} {seconds[area]:6.0f} s {cpu[area]:6.0f} s CPU  {numbers}{why}")


def _print_greediest(terminalreporter: Any) -> None:
    """Those that took a second of the processors or more."""
    cpu: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            cpu[getattr(report, "nodeid", "")] += getattr(report, "cpu_s", 0)
    greediest = [(nodeid, used) for nodeid, used in cpu.most_common(GREEDIEST) if used >= 1]
    if greediest:
        terminalreporter.section("processor time")
    for nodeid, used in greediest:
        terminalreporter.write_line(f"{used:6.0f} s  {nodeid}")


def _area(nodeid: str) -> str:
    parts = nodeid.split("::", maxsplit=1)[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"
