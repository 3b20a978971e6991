"""Rollout servers and the episodes on them: start, then model calls and tools in turn, on one server per episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from penstock.simulator.config import Rollout, Simulation
from penstock.simulator.episodes import Group, SimulatedEpisode
from penstock.simulator.stage import Clock, Host, Job, Stage


class Server:
    """One engine. Records at which progress each version came, so that tokens can be assigned to versions."""

    def __init__(self, clock: Clock, config: Rollout, host: Host | None) -> None:
        def speed(running: int) -> float:
            return 1.0 / (config.token_s + config.token_s_per_sequence * (running - 1))

        self.stage = Stage(clock, speed, config.concurrent, host, one_core=True)
        self.episodes: dict[int, SimulatedEpisode] = {}
        """Episodes on this server, by identity."""
        self._versions: list[tuple[float, int]] = [(0.0, 0)]

    def swap(self, version: int) -> None:
        self.stage.settle()
        self._versions.append((self.stage.progress, version))

    def count_tokens(self, episode: SimulatedEpisode, job: Job, tokens: float) -> None:
        """Add the job's first `tokens` to the versions under which they were decoded."""
        upper = job.entered + tokens
        for since, version in reversed(self._versions):
            lower = max(since, job.entered)
            if upper > lower:
                episode.versions[version] = episode.versions.get(version, 0.0) + upper - lower
                upper = lower
            if since <= job.entered:
                return


class Rollouts:
    """Runs the episodes of groups that were begun and says when a group has ended."""

    def __init__(self, clock: Clock, config: Simulation, host: Host | None, ended: Callable[[Group], None]) -> None:
        self.servers = [Server(clock, config.rollout, host) for _ in range(config.rollout.servers + config.lent)]
        self._lent = self.servers[config.rollout.servers :]
        """Servers on the trainer's GPUs."""
        self._asleep = False
        self._turns = 0
        self.starts = Stage(clock, lambda _: 1.0, config.rollout.starts_at_once, host)
        self.running = 0
        self._clock, self._config, self._ended = clock, config, ended
        self._at: dict[int, Server] = {}
        self._jobs: dict[int, Job] = {}
        """The call of each episode that waits or runs at its server."""
        self._queue: deque[SimulatedEpisode] = deque()
        self._lost: list[Server] = []
        self._random = np.random.default_rng([config.seed, config.rollout.servers])
        for server in self.servers if config.rollout.lost_after_s else ():
            self._lose_later(server)

    def begin(self, group: Group) -> None:
        self._queue.extend(group.episodes)
        self._lease()

    def swap(self, version: int) -> None:
        """All servers load the version, each pausing for the swap; requests in flight continue under it."""
        for server in self.servers:
            server.swap(version)
            if self._config.weights.pause_s:
                server.stage.pause()
                self._clock.after(self._config.weights.pause_s, server.stage.resume)

    def sleep(self) -> bool:
        """Lent servers stop for the trainer; their episodes continue at others. False: they were asleep."""
        self._turns += 1
        if self._asleep:
            return False
        self._asleep = True
        for server in self._lent:
            server.stage.pause()
            for episode in list(server.episodes.values()):
                self._move(episode)
        return True

    def wake(self, after_s: float) -> None:
        """Lent servers continue, unless the trainer takes the GPUs back before."""
        turn = self._turns

        def resume() -> None:
            if turn == self._turns:
                self._asleep = False
                for server in self._lent:
                    server.stage.resume()

        self._clock.after(after_s, resume)

    def _lose_later(self, server: Server) -> None:
        self._clock.after(self._random.exponential(self._config.rollout.lost_after_s), lambda: self._lose(server))

    def _lose(self, server: Server) -> None:
        """Move its episodes to others, with their journaled tokens; if all servers are lost, they wait for this one."""
        self._lost.append(server)
        server.stage.pause()
        if len(self._lost) < len(self.servers):
            for episode in list(server.episodes.values()):
                self._move(episode)

        def replace() -> None:
            self._lost.remove(server)
            server.stage.resume()
            self._lose_later(server)

        self._clock.after(self._config.rollout.back_after_s, replace)

    def _lease(self) -> None:
        rollout = self._config.rollout
        while self._queue and (not rollout.in_flight or self.running < rollout.in_flight):
            self.running += 1
            self._start(self._queue.popleft())

    def _start(self, episode: SimulatedEpisode) -> None:
        if self._config.rollout.start_s:
            self.starts.submit(self._config.rollout.start_s, lambda _: self._place(episode))
        else:
            self._place(episode)

    def _place(self, episode: SimulatedEpisode) -> None:
        self._at[id(episode)] = server = self._emptiest()
        server.episodes[id(episode)] = episode
        self._call(episode, self._config.work.prompt_tokens)

    def _emptiest(self) -> Server:
        """The server with the fewest episodes, of those that are awake."""
        awake = self.servers[: self._config.rollout.servers] if self._asleep else self.servers
        living = [server for server in awake if server not in self._lost]
        return min(living or awake, key=lambda s: len(s.episodes))

    def _move(self, episode: SimulatedEpisode) -> None:
        """To another server, with what is left of its call."""
        before, job = self._at[id(episode)], self._jobs.get(id(episode))
        self._at[id(episode)] = server = self._emptiest()
        server.episodes[id(episode)] = before.episodes.pop(id(episode))
        if job is not None:
            remaining = before.stage.withdraw(job)
            before.count_tokens(episode, job, job.work - remaining)
            self._jobs[id(episode)] = server.stage.submit(remaining, job.done)

    def _call(self, episode: SimulatedEpisode, new_tokens: float) -> None:
        rate = self._config.rollout.prefill_tokens_per_s
        if rate and new_tokens:
            self._clock.after(new_tokens / rate, lambda: self._decode(episode))
        else:
            self._decode(episode)

    def _decode(self, episode: SimulatedEpisode) -> None:
        stage, share = self._at[id(episode)].stage, episode.tokens / episode.turns
        self._jobs[id(episode)] = stage.submit(share, lambda job: self._decoded(episode, job))

    def _decoded(self, episode: SimulatedEpisode, job: Job) -> None:
        del self._jobs[id(episode)]
        self._at[id(episode)].count_tokens(episode, job, job.work)
        episode.turn += 1
        if episode.turn == episode.turns:
            self._finish(episode)
            return
        observed = self._config.work.observation_tokens
        self._clock.after(episode.tool_s[episode.turn - 1], lambda: self._call(episode, observed))

    def _finish(self, episode: SimulatedEpisode) -> None:
        del self._at.pop(id(episode)).episodes[id(episode)]
        self.running -= 1
        episode.group.running -= 1
        self._lease()
        if not episode.group.running:
            self._ended(episode.group)
