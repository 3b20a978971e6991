from __future__ import annotations

from tests.gateway.conftest import USER, MakeBench, back, say, whole

AGAIN = {"role": "user", "content": "Sure?"}
THINKING = "<think>\nAdd them.\n</think>\n\n46"


async def test_stripped_thinking_makes_a_segment_per_user_turn_and_is_reported(make_bench: MakeBench) -> None:
    bench = await make_bench(THINKING, "Sure.", "Yes.", template="qwen3")
    bench.parts.chat.thinking_history = "strip"
    episode = await bench.open()
    messages = [USER]
    for _ in range(3):
        messages += [back(await say(episode, messages)), AGAIN]
    trajectory = await bench.trajectory(episode)
    texts = [bench.parts.chat.decode(whole(segment)) for segment in trajectory.segments]
    assert len(texts) == 2
    assert "Add them." in texts[0]
    assert "Add them." not in texts[1]
    assert texts[1].count("Sure?") == 2
    assert trajectory.metrics["mismatch/rewritten"] == 1
    assert trajectory.metrics["merged_turns"] == 0.5


async def test_kept_thinking_is_one_segment(make_bench: MakeBench) -> None:
    bench = await make_bench(THINKING, "Sure.", template="qwen3")
    episode = await bench.open()
    first = back(await say(episode))
    await say(episode, [USER, first, AGAIN])
    trajectory = await bench.trajectory(episode)
    assert len(trajectory.segments) == 1
    assert trajectory.metrics["mismatch/rewritten"] == 0
    assert trajectory.metrics["merged_turns"] == 1.0
