"""The page in a real Chromium, over 10,000 stored trajectories, on a large and on a small screen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browser import IN_BROWSER, Tab, page_process
from tests.dashboard.recorded import ANSWER, CALL, record, said, told, write_config, write_rows, write_step

pytestmark = IN_BROWSER
STEPS, SAVED = 1250, 8
ALL_ARE_LISTED = "() => document.querySelector('#found')?.textContent === '10,000 trajectories'"
FLING = "part => { const box = document.querySelector('.rows'); box.scrollTop = part * box.scrollHeight; }"

LIVE_BEFORE_METRICS = """{
    const plain = window.fetch;
    let ask, tell;
    const asked = new Promise((done) => { ask = done; });
    const told = new Promise((done) => { tell = done; });
    window.fetch = async (url, ...rest) => {
        if (url.includes("/over/metrics?points")) {
            ask();
            await told;
        }
        if (!url.endsWith("/over/live")) return plain(url, ...rest);
        await asked;
        const answer = await plain(url, ...rest);
        setTimeout(tell);
        return answer;
    };
}"""
"""The page gets `live` after it has asked for the metrics and before it gets them."""


@pytest.fixture(scope="module", autouse=True)
def many(runs_dir: Path) -> None:
    """10,000 trajectories; number 4,321 alone says something special. And a run with another learning rate."""
    write_config(runs_dir / "many", "max_staleness: 2\ntrainer: {lr: 0.001, ranks: 1}\nrollout: {servers: 1}\n")
    filler = " ".join(f"word{n}" for n in range(60))
    for step in range(STEPS):
        records = []
        for member in range(SAVED):
            number = step * SAVED + member
            words = f"the needle {number}" if number == 4321 else f"answer {number} {filler}"
            runs = [said(CALL, step), told(ANSWER), said(words, step)]
            records.append(record(f"train/{step:05d}#{member}", runs, float(number % 2)))
        write_step(runs_dir / "many", step, records)
    write_rows(
        runs_dir / "many",
        [{"step": step, "reward": step / STEPS, "wall_s": 2.0, "wait_s": 1.0} for step in range(STEPS)],
    )
    write_config(runs_dir / "other", "max_staleness: 2\ntrainer: {lr: 0.1, ranks: 1}\nrollout: {servers: 1}\n")
    write_rows(runs_dir / "other", [{"step": step, "reward": 0.5} for step in range(3)])


async def test_ten_thousand_trajectories(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab()
    await tab.sign_in("looks")
    await tab.go("#/many/trajectories", ".row")
    await tab.until(ALL_ARE_LISTED)
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
    # The list looks for new ones every few seconds, which asks for no rows.
    assert len([one for one in tab.requests if "/trajectories?" in one and "limit=0" not in one]) < 25
    await tab.press("/")
    await tab.page.keyboard.type("the NEEDLE")
    await tab.until("() => document.querySelector('#found').textContent === '1 trajectory'")
    assert "train/00540#1" in await tab.text(".row")
    assert "text=the+NEEDLE" in tab.page.url
    await tab.press("Escape", "j", "Enter")
    await tab.page.wait_for_selector(".turn")
    await tab.until("() => document.querySelector('#main').innerText.includes('the needle 4321')")
    await tab.press("2")
    await tab.until("() => document.querySelector('.plot')?.plot.wasShown")  # from then on they are zoomed alike
    points = await tab.page.evaluate("() => document.querySelector('.plot').plot.data[0].length")
    assert 300 < points <= 400, "1,250 steps are thinned to what a screen shows"
    ranges = "() => [...document.querySelectorAll('.plot')].map(({ plot }) => plot.scales.x.min)"
    await tab.page.evaluate("() => document.querySelector('.plot').plot.setScale('x', { min: 600, max: 700 })")
    assert set(await tab.page.evaluate(ranges)) == {600}, "all charts of a view are zoomed alike"


async def test_overview_of_an_ended_run_in_the_browser(runs_dir: Path, open_tab: Callable[..., Any]) -> None:
    run = runs_dir / "over"
    write_config(run, "trainer: {ranks: 1}\nrollout: {servers: 1}\n")
    flat = {"reward": 0.0, "reward_std": 0.0, "episodes": 8, "faults": {"malformed calls": 8}}
    flat |= {"length_decile/1": 12, "length_decile/10": 640, "over_age_share/1": 0.0, "over_age_share/10": 0.25}
    write_rows(run, [{"step": step, "wall_s": 2.0, "wait_s": 0.0, **flat} for step in range(4)])
    write_step(run, 3, [record("train/0#0", [said("answer", 3)], 0.0)])
    (run / "ended.json").write_text('{"version": 4, "why": "all steps are done"}')
    (run / "summary.json").write_text('{"steps": 4, "reward_last": 0.0, "restarts": {"agent-0": 2}}')
    tab: Tab = await open_tab()
    await tab.page.add_init_script(LIVE_BEFORE_METRICS)
    await tab.sign_in("looks")
    await tab.go("#/over/overview", "#newest")
    await tab.page.wait_for_selector("#warning")
    told = await tab.text("main")
    for words in ("Ended: all steps are done", "restarts of agent-0", "malformed calls (32 of 32 episodes)"):
        assert words in told
    assert "null" not in told
    for words in ("shortest tenth 12", "longest tenth 640", "longest tenth 25 %"):
        assert words in told
    assert "train/0#0" in await tab.text("#newest")
    await tab.go("#/over/trajectories", ".row .step")
    assert "1 trajectory kept of 32 trained episodes" in await tab.text("#found")
    assert "turns, tokens" in await tab.text(".headings")
    for step, rows in (("4", 1), ("3", 0)):  # as in the list, where steps count from 1
        await tab.page.fill("[name=step]", step)
        await tab.until("count => document.querySelectorAll('.row').length === count", rows)
    for end, kind, words in (
        ({"why": "eval/reward is 0.96 at version 4: the target 0.95 is reached"}, "good", "Ended: eval/reward is 0.96"),
        ({"why": "no progress for 9 s", "failed": True}, "bad", "Failed: no progress for 9 s"),
    ):
        (run / "ended.json").write_text(json.dumps(end))
        await tab.go("#/over/curves", ".chart canvas")
        await tab.go("#/over/overview", f"#state.{kind}")
        assert words in await tab.text("#state")


async def test_a_folder_without_runs_says_how_to_start_one(tmp_path: Path, browser: Any) -> None:
    with page_process(tmp_path / "none") as url:
        context = await browser.new_context()
        tab = Tab(await context.new_page(), url)
        await tab.page.goto(url)
        await tab.page.fill("#token", "writes")
        await tab.page.keyboard.press("Enter")
        await tab.page.wait_for_selector("#no-runs")
        assert "penstock run recipes/calculator.yaml" in await tab.text()
        write_config(tmp_path / "none" / "first", "trainer: {ranks: 1}\n")
        await tab.page.wait_for_selector("nav a[aria-current]")
        assert "#/first/overview" in tab.page.url
        await context.close()
    assert tab.trouble == []


async def test_on_a_telephone_and_by_keys_alone(open_tab: Callable[..., Any]) -> None:
    tab: Tab = await open_tab(width=390, height=780)
    await tab.sign_in()
    wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    await tab.go("#/many/overview", "#state:not(:empty)")
    assert await tab.page.evaluate(wide) <= 0
    for key, shown in (("2", ".chart canvas"), ("3", ".row .step"), ("4", "[role=status]"), ("5", ".runs input")):
        await tab.press(key)
        await tab.page.wait_for_selector(shown)
        assert await tab.page.evaluate(wide) <= 0, f"view {key} is wider than the screen"
    await tab.press("3")
    await tab.until(ALL_ARE_LISTED)
    await tab.press("ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    await tab.page.wait_for_selector(".turn")
    assert "train/01249#0" in await tab.text("h2")
    assert await tab.page.evaluate(wide) <= 0
    await tab.picture("telephone")
    await tab.press("?")
    assert "colour tokens" in await tab.text("#help")
    await tab.press("Escape", "5")
    await tab.page.wait_for_selector(".runs input[value=other]")
    await tab.page.click(".runs input[value=other]")
    await tab.page.wait_for_selector("#differences")
    cells = "all => all.map(one => [...one.cells].map(cell => cell.textContent))"
    rows = await tab.page.eval_on_selector_all("#differences tbody tr", cells)
    assert ["trainer.lr", "0.001", "0.1"] in rows
    assert await tab.page.evaluate(wide) <= 0
