"""The page in a real Chromium, over trajectories that want to be more than text; and what it does with its token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.dashboard.browser import IN_BROWSER, Tab
from tests.dashboard.recorded import record, said, told, write_config, write_rows, write_step

pytestmark = IN_BROWSER
ATTACK = (
    "<script>window.attacked=1</script><img src=x onerror='window.attacked=2'><svg onload='window.attacked=3'>"
    "<a href=\"javascript:window.attacked=4\">go</a>\"'><iframe srcdoc='<script>parent.attacked=5</script>'></iframe>"
    "\x1b[2J\x1b[31mred\x1b[0m\x07 \u202egnp.exe\u202c \u2066x\u2069 \u200bz <|\u202e\x1b|></pre></textarea>"
)
PLAIN_ATTACK = "<img src=x onerror='window.attacked=6'>\x1b[31m\u202eb"
METRIC = "entropy_<img src=x onerror='window.attacked=9'>"
SINKS = (
    "document.body.innerHTML = '<b>x</b>'",
    "document.write('x')",
    "document.createElement('script').textContent = 'window.attacked = 10'",
    "document.createElement('iframe').srcdoc = 'x'",
)


@pytest.fixture(scope="module", autouse=True)
def attack(runs_dir: Path) -> None:
    """Everything that a model, a tool or an agent can write holds an attack."""
    run = runs_dir / "attack"
    write_config(runs_dir / "other")
    write_rows(runs_dir / "other", [{"step": 0, "reward": 0.5}])
    write_config(run, yaml.safe_dump({"agent": {"parser": "hermes"}, "note": ATTACK, "trainer": {"lr": 0.1}}))
    called = {"name": "<img src=x onerror='window.attacked=7'>", "arguments": {"<b>": "<script>attacked=8</script>"}}
    call = f"<tool_call>\n{json.dumps(called)}\n</tool_call>"
    runs = [said(ATTACK, 0), told(ATTACK), said(call, 1), said(ATTACK, 1)]
    one = record(f"train/{PLAIN_ATTACK}#0", runs, kind="truncated", worker=ATTACK, agent=ATTACK)
    one |= {"data_source": ATTACK, "outcome": {"kind": "truncated", "reason": ATTACK, "component": ATTACK}}
    one["extra"]["trace"] = [["model", ATTACK, 0.0, 1.0], [ATTACK, ATTACK, 1.0, 1.0]]
    one["metrics"][ATTACK] = 1.0
    one["segments"][0]["prompt"] = ATTACK
    write_step(run, 0, [one])
    write_rows(run, [{"step": step, "reward": 0.5, METRIC: 1.0, ATTACK: 2.0} for step in range(3)])


async def test_an_attack_in_a_trajectory_does_nothing(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab()
    await tab.sign_in()
    chart = ".chart canvas"
    views = {"trajectories": ".row", "curves": chart, "compare?with=other": chart, "overview": "#state:not(:empty)"}
    for view, shown in views.items():
        await tab.go(f"#/attack/{view}", shown)
        await _nothing_happened(tab)
    await tab.page.evaluate("name => { location.hash = `#/attack/curves?metric=${encodeURIComponent(name)}`; }", METRIC)
    await tab.until(
        "name => [...document.querySelectorAll('figcaption')].some(one => one.textContent === name)", METRIC
    )
    await tab.go("#/attack/trajectories?text=%3Cscript%3E", ".row")
    await tab.press("j", "Enter")
    await tab.page.wait_for_selector(".turn.model")
    for keys in ("m", "l", "v", "r", "r", "r"):
        await tab.press(keys)
        await _nothing_happened(tab)
    shown = await tab.text(".turn.model")
    assert "<script>window.attacked=1</script>" in shown, "it is shown as what it is"
    assert "␛[31mred␛[0m␇ ⟨U+202E⟩gnp.exe⟨U+202C⟩ ⟨U+2066⟩x⟨U+2069⟩ ⟨U+200B⟩z" in shown
    assert not set(await tab.text("body")) & set("\x1b\x07\u202e\u202c\u2066\u2069\u200b")
    await tab.press("g")
    await tab.page.wait_for_selector(".column")
    await _nothing_happened(tab)
    for sink in SINKS:  # who forgets the rule is stopped by the policy
        blocked = await tab.page.evaluate(f"() => {{ try {{ {sink}; return false; }} catch (e) {{ return true; }} }}")
        assert blocked, sink
    assert await tab.page.evaluate("() => window.attacked") is None
    assert len(tab.trouble) == len([one for one in tab.trouble if "requires 'Trusted" in one]) >= len(SINKS)
    tab.trouble.clear()


async def _nothing_happened(tab: Tab) -> None:
    await asyncio.sleep(0.05)
    assert await tab.page.evaluate("() => window.attacked") is None
    assert await tab.page.locator("main :is(script, img, iframe, object, embed, base, form[action])").count() == 0
    assert await tab.page.locator("main a:not([href^='#/'])").count() == 0
    assert tab.trouble == []


async def test_the_token_stays_in_the_tab(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab()
    await tab.page.goto(tab.url)
    await tab.page.fill("#token", "wrong")
    await tab.press("Enter")
    await tab.page.wait_for_selector("dialog .bad")
    assert "token of this page is needed" in await tab.text("dialog .bad")
    await tab.page.fill("#token", "looks")
    await tab.press("Enter")
    await tab.page.wait_for_selector("nav a[aria-current]")
    assert await tab.text("#scope") == "read only"
    kept = "() => [document.cookie, JSON.stringify(localStorage), location.href, document.body.outerHTML].join()"
    assert "looks" not in await tab.page.evaluate(kept)
    assert not [one for one in tab.requests if "looks" in one or "wrong" in one]
    await tab.page.reload()
    await tab.page.wait_for_selector("nav a[aria-current]")
