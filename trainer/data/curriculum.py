"""Curricula: which tasks come how often, by data source and by how often their rows are passed.

    draw      source, by its weight ─► pool, by weight × rows in it ─► the row of the pool that was drawn longest ago
    observe   groups of a trained step ─► pass rate of their rows ─► pool: new, learnable, easy or hard

Pass rate of a row: q, the share of the newest group's episodes that passed, and from the second group on
p ← (p + q) / 2: what the policy was some versions ago counts ever less. A group of n episodes whose row is passed with
probability p has a signal with probability 1 − pⁿ − (1 − p)ⁿ, so rows that are always or never passed come seldom, and
still often enough to be seen leaving their pool.

Both choices are smooth weighted round robin, without chance: of n draws each choice gets its share of n, less than one
draw off for two choices, and spread evenly.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from penstock.common import pattern_of
from penstock.transfer_queue import is_reached

K = TypeVar("K", bound=str)
EASY_FROM, HARD_UP_TO = 0.9, 0.1
"""Pass rates of easy and of hard rows; learnable ones lie between."""
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RowPool(StrEnum):
    """Rows of one data source by their pass rate."""

    NEW = "new"
    """None of their groups was trained yet."""
    LEARNABLE = "learnable"
    EASY = "easy"
    HARD = "hard"


class CurriculumWeights(BaseModel):
    """The weights that may be changed while a run trains (`penstock curriculum`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sources: dict[str, Weight] = Field(
        default_factory=dict,
        description="Data source or pattern (`my_*`) → how often its tasks come, relative to those of other sources;"
        " 0: never. Sources that are not named count 1.",
    )
    new: Weight = Field(1.0, description="How often a row comes that was not trained yet, relative to other rows.")
    learnable: Weight = Field(1.0, description="How often a row comes that is sometimes passed.")
    easy: Weight = Field(0.1, description="How often a row comes that is nearly always passed.")
    hard: Weight = Field(0.1, description="How often a row comes that is hardly ever passed.")

    def of_source(self, data_source: str) -> float:
        """Return the weight of a source. Exact names precede patterns."""
        name = pattern_of(data_source, self.sources)
        return 1.0 if name is None else self.sources[name]

    def of_pool(self, pool: RowPool) -> float:
        weight: float = getattr(self, pool)  # a pool's value is the name of its field
        return weight

    def check(self, data_sources: Sequence[str]) -> None:
        """Raises `ValueError` if no task could be drawn, or a name matches no source."""
        known = sorted(set(data_sources))
        for name in self.sources:
            if all(pattern_of(source, [name]) is None for source in known):
                raise ValueError(f"sources has {name}, the data has {', '.join(known)}")
        if not any(self.of_source(source) for source in known):
            raise ValueError(f"the weight of every source is 0: give one of {', '.join(known)} more")


class CurriculumConfig(CurriculumWeights):
    """Which tasks come how often (docs/guide/data.md)."""

    pass_reward: float = Field(1.0, description="An episode with this reward or more has passed.")

    @property
    def weights(self) -> CurriculumWeights:
        """The part that may be changed while a run trains."""
        return CurriculumWeights(**{name: getattr(self, name) for name in CurriculumWeights.model_fields})


class RoundRobin(Generic[K]):
    """Smooth weighted round robin: each key in proportion to its weight. Weights may differ from call to call."""

    def __init__(self) -> None:
        self._credit: dict[K, float] = {}

    def pick(self, weights: Mapping[K, float]) -> K:
        """One of the keys with a weight above 0, of which there is at least one."""
        total = sum(weights.values())
        for key, weight in weights.items():
            self._credit[key] = self._credit.get(key, 0.0) + weight / total
        chosen = max((key for key, weight in weights.items() if weight > 0), key=self._credit.__getitem__)
        self._credit[chosen] -= 1.0
        return chosen


class SourceRows:
    """The rows of one data source, in pools."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.pools: dict[RowPool, OrderedDict[int, None]] = {pool: OrderedDict() for pool in RowPool}
        self.pools[RowPool.NEW] = OrderedDict.fromkeys(rows)
        self.rates: dict[int, float] = {}
        """Pass rate by row, of rows that were trained."""
        self.drawn = 0
        self._turns: RoundRobin[RowPool] = RoundRobin()

    def draw(self, weights: CurriculumWeights) -> int:
        """Draw a row. If no row is in a pool with a weight, all rows count alike: a source with a weight never runs
        dry.
        """
        counts = {pool: float(len(rows)) for pool, rows in self.pools.items()}
        shares = {pool: weights.of_pool(pool) * count for pool, count in counts.items()}
        rows = self.pools[self._turns.pick(shares if any(shares.values()) else counts)]
        row = next(iter(rows))
        rows.move_to_end(row)
        self.drawn += 1
        return row

    def observe(self, row: int, passed: float, pool: RowPool) -> None:
        self.rates[row] = passed
        if row not in self.pools[pool]:
            for rows in self.pools.values():
                rows.pop(row, None)
            self.pools[pool][row] = None


class Curriculum:
    """Draws rows and learns from their groups. Pass rates of rows in flight are those of earlier groups."""

    def __init__(
        self, data_sources: Sequence[str], config: CurriculumConfig, seed: int, *, shuffle: bool = True
    ) -> None:
        """`data_sources`: of each row. Raises `ValueError` where the weights fit no source."""
        config.check(data_sources)
        self._config = config
        self.weights: CurriculumWeights = config.weights
        self._source_of = data_sources
        order = list(range(len(data_sources)))
        if shuffle:
            random.Random(f"{seed}/curriculum").shuffle(order)
        by_source: dict[str, list[int]] = {}
        for row in order:
            by_source.setdefault(data_sources[row], []).append(row)
        self._sources = {source: SourceRows(by_source[source]) for source in sorted(by_source)}
        self._turns: RoundRobin[str] = RoundRobin()

    def draw(self) -> int:
        """The row that comes next."""
        weights = {source: self.weights.of_source(source) for source in self._sources}
        return self._sources[self._turns.pick(weights)].draw(self.weights)

    def observe(self, row: int, passed: float) -> None:
        """`passed`: share of a group's episodes that passed. Rows that the data does not have are left out."""
        if not 0 <= row < len(self._source_of):
            return
        rows = self._sources[self._source_of[row]]
        rate = (rows.rates[row] + passed) / 2 if row in rows.rates else passed
        pool = RowPool.EASY if rate >= EASY_FROM else RowPool.HARD if rate <= HARD_UP_TO else RowPool.LEARNABLE
        rows.observe(row, rate, pool)

    def has_passed(self, reward: float) -> bool:
        return is_reached(reward, self._config.pass_reward)

    def numbers(self) -> dict[str, float]:
        """``curriculum/SOURCE/…``: weight, tasks drawn by this trainer process, mean pass rate of trained rows, rows by
        pool."""
        numbers: dict[str, float] = {}
        for source, rows in self._sources.items():
            rates = rows.rates.values()
            own = {"weight": self.weights.of_source(source), "drawn": rows.drawn}
            own |= {"pass_rate": sum(rates) / len(rates)} if rates else {}
            own |= {str(pool): len(members) for pool, members in rows.pools.items()}
            numbers |= {f"curriculum/{source}/{name}": float(value) for name, value in own.items()}
        return numbers
