"""`penstock rescore`: archived trajectories of a run get new rewards, and a model is trained on them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.commands.replay import First, Last, checked, new_replay, replay_errors, start_replay
from penstock.deploy.commands.shared import RUNS, RunName, RunsDir, folder_of_run, load_run, user_errors
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run_dir import RunDir

if TYPE_CHECKING:
    from penstock.agent_loops import ChatTokens
    from penstock.agent_loops.rewards import RewardFunction
    from penstock.trainer import ReplayJob


def rescore(
    run: RunName,
    *,
    reward: Annotated[str, typer.Option(help="As agent.reward: FILE.py:NAME, a dotted path or a known name.")],
    first: First = 0,
    last: Last = None,
    model: Annotated[
        str | None, typer.Option(help="Train this model, as another run left it, and not the run's own.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="trainer.key=value, or agent.rewards.key=value.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default: rescores/FROM-TO in the run's.")] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Give a run's archived trajectories new rewards and train on them: a reward was wrong, or another one is wanted.

    No token is sampled. The new folder has an archive of its own with the new rewards, which `penstock archive` reads,
    and final_model, from which a run can continue. Behaviour logprobs are exact: each step is corrected by its
    importance weights, and training ends before a step that they cannot correct.

    Examples: penstock rescore calculator --reward reward.py:compute_score
    penstock run runs/calculator/rescores/0-30 name=repaired model=runs/calculator/rescores/0-30/final_model
    """
    from penstock.agent_loops import InfraFailure, LoadError
    from penstock.trainer import DataError

    with replay_errors(), user_errors(DataError, InfraFailure, LoadError):
        root = folder_of_run(run, runs_dir).resolve()
        all_changes = [*changes_of(reward, model), *checked(changes or [], "trainer", "agent.rewards")]
        replay = new_replay(root, first, last, all_changes, out or root / "rescores", has_new_rewards=True)
        config = load_run(root, all_changes)
        asyncio.run(_store_rescored(replay, config))
        start_replay(replay, all_changes)


def changes_of(reward: str, model: str | None) -> list[str]:
    """Return the changes of the run's configuration. Settings of the former reward are not those of the new one."""
    from penstock.agent_loops import BY_SOURCE

    former = [] if reward == BY_SOURCE else ["agent.rewards.sources={}", "agent.rewards.settings={}"]
    return [f"agent.reward={reward}", *former, *([f"model={model}"] if model else [])]


async def _store_rescored(replay: ReplayJob, config: RunConfig) -> None:
    """Make the folder, as of a run, with the archive of the new rewards; nothing is left of it if one fails."""
    from penstock.agent_loops.chat import chat_of
    from penstock.agent_loops.rewards import load_reward
    from penstock.deploy.preflight.agent import reward_sandbox

    folder, model = replay.job.run_dir, replay.of_run.run.model
    chat = chat_of(model, config.agent)
    if chat_of(config.model, config.agent).tokenizer.get_vocab() != chat.tokenizer.get_vocab():
        raise ConfigError(f"--model {config.model}: its tokenizer is not that of {model}, which the episodes are of")
    async with reward_sandbox(config) as sandbox:
        reward = load_reward(config.agent, Path.cwd(), sandbox)
        assert reward is not None
        try:
            await _store(replay, config, reward, chat)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            await reward.close()
    queue = config.transfer_queue.model_copy(update={"archive": None})
    own = {"name": folder.name, "runs_dir": str(folder.parent), "transfer_queue": queue}
    RunDir(folder).write_config(config.model_copy(update=own))


async def _store(replay: ReplayJob, config: RunConfig, reward: RewardFunction, chat: ChatTokens) -> None:
    from penstock.agent_loops import rescored
    from penstock.trainer import tasks_again
    from penstock.transfer_queue import Archive

    folder = replay.job.run_dir
    own = Archive(RunDir(folder).archive, folder.name, 1 << 62)
    batches = replay.archive.batches(replay.first, replay.last)
    episodes = {step: [name for group in groups for name in group] for step, groups in batches.items()}
    named = {name.rpartition("#")[0] for names in episodes.values() for name in names}
    tasks, before, after, changed = tasks_again(config.data, config.seed, named), 0.0, 0.0, 0
    for step, names in episodes.items():
        old = list(replay.archive.read(step, names).values())
        new = await rescored(old, tasks, reward, chat, config.agent.concurrency)
        own.append(step, new)
        before += sum(one.reward or 0.0 for one in old)
        after += sum(one.reward or 0.0 for one in new)
        changed += sum(one.reward != other.reward for one, other in zip(old, new, strict=True))
    own.commit(replay.last, batches, oldest=replay.first)  # training reads all of them next
    count = sum(map(len, episodes.values()))
    print(f"{changed} of {count} episodes have another reward: {before / count:.4g} before, {after / count:.4g} now")
