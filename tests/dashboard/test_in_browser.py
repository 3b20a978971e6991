"""The page in a real Chromium: through a living run, through 10,000 trajectories, and under attack."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.dashboard.browser import CHROMIUM, Tab, chromium, page_process
from tests.dashboard.recorded import ANSWER, CALL, record, said, told, write_config, write_rows, write_step

pytest.importorskip("playwright", reason="playwright is not installed: pip install penstock[dev]")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; scripts/setup-browser installs one"),
]
PICTURES = os.environ.get("PENSTOCK_SCREENSHOTS")
"""A folder for the pictures of docs/dashboard.md; unset: none are taken."""
STEPS, SAVED = 1250, 8
ATTACK = (
    "<script>window.attacked=1</script><img src=x onerror='window.attacked=2'><svg onload='window.attacked=3'>"
    "<a href=\"javascript:window.attacked=4\">go</a>\"'><iframe srcdoc='<script>parent.attacked=5</script>'></iframe>"
    "\x1b[2J\x1b[31mred\x1b[0m\x07 \u202egnp.exe\u202c \u2066x\u2069 \u200bz </pre></textarea>"
)
METRIC = "entropy_<img src=x onerror='window.attacked=9'>"
FORCED = """async episode => {
    const { post } = await import("/static/api.js");
    return post("runs/living/dead-letters/requeue", { episode }).catch((error) => error.status);
}"""
"""Around the button that is disabled."""
FLING = "part => { const box = document.querySelector('.rows'); box.scrollTop = part * box.scrollHeight; }"
SINKS = (
    "document.body.innerHTML = '<b>x</b>'",
    "document.write('x')",
    "document.createElement('script').textContent = 'window.attacked = 10'",
    "document.createElement('iframe').srcdoc = 'x'",
)
PLAIN_ATTACK = "<img src=x onerror='window.attacked=6'>\x1b[31m\u202eb"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("page") / "runs"
    _write_many(runs / "many")
    _write_attack(runs / "attack")
    return runs


@pytest.fixture(scope="module")
def url(runs_dir: Path) -> Iterator[str]:
    with page_process(runs_dir) as address:
        yield address


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    async with chromium() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def open_tab(browser: Any, url: str) -> AsyncIterator[Callable[..., Any]]:
    contexts, tabs = [], []

    async def open_(width: int = 1200, height: int = 800) -> Tab:
        contexts.append(await browser.new_context(viewport={"width": width, "height": height}))
        tabs.append(Tab(await contexts[-1].new_page(), url))
        return tabs[-1]

    yield open_
    for context in contexts:
        await context.close()
    assert [trouble for tab in tabs for trouble in tab.trouble] == []


def _write_many(run: Path) -> None:
    """10,000 trajectories; number 4,321 alone says something special."""
    write_config(run, "max_staleness: 2\ntrainer: {lr: 0.001, ranks: 1}\nrollout: {servers: 1}\n")
    filler = " ".join(f"word{n}" for n in range(60))
    for step in range(STEPS):
        records = []
        for member in range(SAVED):
            number = step * SAVED + member
            words = f"the needle {number}" if number == 4321 else f"answer {number} {filler}"
            runs = [said(CALL, step), told(ANSWER), said(words, step)]
            records.append(record(f"train/{step:05d}#{member}", runs, float(number % 2)))
        write_step(run, step, records)
    write_rows(run, [{"step": step, "reward": step / STEPS, "wall_s": 2.0, "wait_s": 1.0} for step in range(STEPS)])


def _write_attack(run: Path) -> None:
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


async def picture(tab: Tab, name: str) -> None:
    if PICTURES:
        await tab.page.screenshot(path=str(Path(PICTURES) / f"dashboard-{name}.png"))


@pytest.mark.redis
@pytest.mark.torch
async def test_a_living_run(runs_dir: Path, open_tab: Callable[..., Any]) -> None:
    pytest.importorskip("torch", reason="the trainer's recorder needs torch")
    from tests.dashboard.living_run import LivingRun

    async with LivingRun(runs_dir, "living") as run:
        for _ in range(12):
            await run.step()
        tab: Tab = await open_tab()
        await tab.sign_in()
        await tab.go("#/living/overview", "#servers")
        version = "v => document.querySelector('[data-stage=\"policy version\"] .count')?.textContent === v"
        await tab.until(version, "12")
        says = "([where, what]) => document.querySelector(where)?.textContent.includes(what)"
        await tab.until(says, ["#servers", "1 behind"])
        for _ in range(3):  # the picture follows the run
            await run.step()
        await tab.until(version, "15")
        await tab.until(says, [".waits", "the trainer waits for episodes"])
        await tab.until(says, ["#advice", "The trainer waits 25%"])
        await picture(tab, "overview")

        await tab.press("2")
        await tab.until("() => document.querySelectorAll('.chart svg').length >= 12")
        texts = "all => all.map(one => ['figcaption', '.readout'].map(name => one.querySelector(name)?.textContent))"
        figures = dict(await tab.page.eval_on_selector_all(".chart", texts))
        assert figures["reward"].startswith("step 14reward 0.817"), figures
        assert figures["bubble: share of a step that the trainer waits"].endswith("25 %")
        assert figures["entropy"].startswith("step 14entropy 0.732")
        assert figures["staleness of trained tokens, versions"] == "0 old1 old2 old"
        await picture(tab, "curves")

        await tab.press("3")
        await tab.page.wait_for_selector(".row[data-index='59'], .row[data-index='10']")
        assert await tab.text("#found") == "60 trajectories"
        await run.step()
        await tab.until("() => document.querySelector('#found').textContent.startsWith('64')")  # it shows what is new
        await tab.press("j", "Enter")
        await tab.page.wait_for_selector(".turn.model [data-token]")
        await _check_trajectory(tab)
        await _check_letters(tab, run)


async def _check_trajectory(tab: Tab) -> None:
    """The newest one: a call at version 14, an answer at version 15."""
    text = await tab.text()
    assert "turn 1 · model" in text
    assert "turn 2 · model" in text
    assert "print(15*7)" in await tab.text(".call")
    kinds = "all => all.map(one => one.classList[1])"
    assert set(await tab.page.eval_on_selector_all(".turn.model [data-token]", kinds)) == {"said"}
    assert set(await tab.page.eval_on_selector_all(".turn.tools [data-token]", kinds)) == {"fed"}
    await tab.press("v")
    first = "all => all.map(one => one.querySelector('[data-token]').classList[1])"
    assert await tab.page.eval_on_selector_all(".turn.model", first) == ["a0", "a1"]
    await tab.press("l")
    assert len(set(await tab.page.eval_on_selector_all(".turn.model [data-token]", kinds))) >= 3
    await tab.page.hover(".turn.model [data-token='0']")
    assert "sampled, logprob -" in await tab.text("#token")
    assert "version 14" in await tab.text("#token")
    await picture(tab, "trajectory")
    await tab.press("r")
    assert "<tool_call>↵" in await tab.text(".turn.model")
    await tab.press("r")
    assert '"response_mask"' not in await tab.text("pre.record")
    assert '"logprobs"' in await tab.text("pre.record")
    await tab.press("r", "g")
    await tab.page.wait_for_selector(".column")
    members = await tab.page.eval_on_selector_all(".column h3", "all => all.map(one => one.textContent)")
    assert members == ["#0", "#1", "#2", "#3"]


async def _check_letters(tab: Tab, run: Any) -> None:
    """Given up, looked at, refused to a reader, queued again by a writer."""
    letter = await run.bury("the box is gone")
    await tab.press("4")
    await tab.page.wait_for_selector(".letter")
    assert "sandbox: the box is gone" in await tab.text("#letters")
    await tab.press("j", "Enter")
    await tab.page.wait_for_selector(".journal .turn")
    assert "I will look." in await tab.text(".journal")
    await tab.page.evaluate("() => sessionStorage.setItem('penstock-token', 'looks')")
    await tab.page.reload()
    await tab.page.wait_for_selector(".letter button:disabled")
    assert await tab.page.evaluate(FORCED, letter) == 403
    assert (await run.ledger.status()).groups["dead"] == 1
    await tab.page.evaluate("() => sessionStorage.setItem('penstock-token', 'writes')")
    await tab.page.reload()
    await tab.page.click(".letter button")
    await tab.until("() => document.querySelectorAll('.letter').length === 0")
    assert "queued again" in await tab.text("[role=status]")
    status = await run.ledger.status()
    assert (status.groups["dead"], status.groups["queued"]) == (0, 1)


async def test_ten_thousand_trajectories(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab()
    await tab.sign_in("looks")
    await tab.go("#/many/trajectories", ".row")
    await tab.until("() => document.querySelector('#found').textContent === '10,000 trajectories'")
    elements = "() => document.querySelectorAll('.row').length"
    assert await tab.page.evaluate(elements) < 60, "only rows in sight exist"
    assert "train/01249#0" in await tab.text(".row[data-index='0']")
    tab.requests.clear()
    await tab.page.click(".row[data-index='2'] .step", no_wait_after=True)
    await tab.page.wait_for_selector(".turn")
    assert "train/01249#2" in await tab.text("h2")
    await tab.press("j")  # the next of the list
    await tab.until("() => document.querySelector('h2')?.textContent === 'train/01249#3'")
    await tab.press("Escape")
    await tab.page.wait_for_selector(".row[data-index='0'] .episode")
    await tab.press("j", "End")
    await tab.until(
        "() => document.querySelector(\".row[data-index='9999'] .episode\")?.textContent === 'train/00000#7'"
    )
    for part in (0.2, 0.8, 0.5):  # flung about: what is in sight is loaded, the rest is not
        await tab.page.evaluate(FLING, part)
        first = int(part * 10_000) + 5
        await tab.until("i => document.querySelector(`.row[data-index='${i}'] .episode`)", first)
        assert await tab.page.evaluate(elements) < 60
    assert len([one for one in tab.requests if "/trajectories?" in one]) < 25
    await tab.press("/")
    await tab.page.keyboard.type("the NEEDLE")
    await tab.until("() => document.querySelector('#found').textContent === '1 trajectories'")
    assert "train/00540#1" in await tab.text(".row")
    assert "text=the+NEEDLE" in tab.page.url
    await tab.press("Escape", "j", "Enter")
    await tab.page.wait_for_selector(".turn")
    assert "the needle 4321" in await tab.text()
    await tab.press("2")
    await tab.page.wait_for_selector(".chart svg polyline")
    points = await tab.page.get_attribute(".chart .line", "points")
    assert 300 < len(points.split()) <= 400, "1,250 steps are thinned to what a screen shows"


async def test_an_attack_in_a_trajectory_does_nothing(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab()
    await tab.sign_in()
    chart = ".chart svg"
    views = {"trajectories": ".row", "curves": chart, "compare?with=many": chart, "overview": ".advice"}
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


async def test_on_a_telephone_and_by_keys_alone(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab(width=390, height=780)
    await tab.sign_in()
    wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    await tab.go("#/many/overview", ".advice")
    assert await tab.page.evaluate(wide) <= 0
    for key, shown in (("2", ".chart svg"), ("3", ".row .step"), ("4", "[role=status]"), ("5", ".runs input")):
        await tab.press(key)
        await tab.page.wait_for_selector(shown)
        assert await tab.page.evaluate(wide) <= 0, f"view {key} is wider than the screen"
    await tab.press("3")
    await tab.page.wait_for_selector(".row .step")
    await tab.press("ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    await tab.page.wait_for_selector(".turn")
    assert "train/01249#0" in await tab.text("h2")
    assert await tab.page.evaluate(wide) <= 0
    await picture(tab, "telephone")
    await tab.press("?")
    assert "colour tokens" in await tab.text("#help")
    await tab.press("Escape", "5")
    await tab.page.wait_for_selector(".runs input[value=attack]")
    await tab.page.click(".runs input[value=attack]")
    await tab.page.wait_for_selector("#differences")
    cells = "all => all.map(one => [...one.cells].map(cell => cell.textContent))"
    rows = await tab.page.eval_on_selector_all("#differences tbody tr", cells)
    assert ["trainer.lr", "0.001", "0.1"] in rows
    assert await tab.page.evaluate(wide) <= 0
