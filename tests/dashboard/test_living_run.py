"""The page in a real Chromium, through a run that goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browser import IN_BROWSER, Tab

pytestmark = [*IN_BROWSER, pytest.mark.redis, pytest.mark.torch]
FORCED = """async episode => {
    const { post } = await import("/static/api.js");
    return post("runs/living/dead-letters/requeue", { episode }).catch((error) => error.status);
}"""
"""Around the button that is disabled."""


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
        (run.root / "accounts.json").write_text('{"accounts": {"tokens": {"trained": 75, "sampled again": 25}}}')
        await tab.until(says, ["#accounts [data-resource=tokens]", "75 % trained (75) 25 % sampled again (25)"])
        await tab.picture("overview")

        await tab.press("2")
        await tab.until("() => document.querySelectorAll('.chart canvas').length >= 12")
        texts = "all => all.map(one => ['figcaption', '.readout'].map(name => one.querySelector(name)?.textContent))"
        figures = dict(await tab.page.eval_on_selector_all(".chart", texts))
        assert figures["reward"].startswith("step 15reward 0.817"), figures
        assert figures["bubble: share of a step that the trainer waits"].endswith("25 %")
        assert figures["entropy"].startswith("step 15entropy 0.732")
        assert figures["staleness of trained tokens"] == "current 55 %1 version old 27 %2 versions old 18 %"
        await tab.picture("curves")

        await tab.press("3")
        await tab.page.wait_for_selector(".row[data-index='59'], .row[data-index='10']")
        await tab.until("() => document.querySelector('#found').textContent === '60 trajectories'")
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
    await tab.picture("trajectory")
    await tab.press("r")
    await tab.until("() => document.querySelector('.turn.model')?.textContent.includes('<tool_call>↵')")
    await tab.press("r")
    await tab.page.wait_for_selector("pre.record")
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
    assert (await run.queue.status()).groups["dead"] == 1
    await tab.page.evaluate("() => sessionStorage.setItem('penstock-token', 'writes')")
    await tab.page.reload()
    await tab.page.click(".letter button")
    await tab.until("() => document.querySelectorAll('.letter').length === 0")
    assert "queued again" in await tab.text("[role=status]")
    status = await run.queue.status()
    assert (status.groups["dead"], status.groups["queued"]) == (0, 1)
