"""The routers of a mixture of experts: an engine records what they choose, a trainer replays it.

    mixture.forward ─► scores of all experts ─► torch.topk ─► weights of the chosen ones ─► experts
                                                   │
                    recorded ◄─ the chosen ────────┤
                    replayed ─► their scores ───────┘     gradients flow through these scores into the router

Families differ in what they make of the scores and agree in `torch.topk` over all experts of a layer: that one call is
taken over, inside the forward of the layers that have experts, so that no family's formula is repeated here. A layer
whose router chooses in another way is refused by trying (`check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.rollout_server.routed_experts import LEAST_PER_TOKEN, PER_TOKEN, Mixtures

KEYWORD = "routing"
"""Argument of a model's forward that holds a `Routing`."""
TRIED = (5, 3, 11, 2, 7, 1)


class NoRouters(ValueError):
    """The model's routers cannot be recorded; the message says why."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of one call of a model. T = its tokens, of all lines."""

    experts: Tensor | None = None
    """[T, layers, k]; a row of k equal numbers: the router chooses. None: it always does."""
    real: Tensor | None = None
    """[T] bool, not filled up; None: all are."""


@dataclass(slots=True)
class LayerLoad:
    """Sums over tokens that learned, of one layer with E experts."""

    chosen: Tensor
    """[E] float64, how often"""
    probability: Tensor
    """[E] float64, of the router's softmax"""
    tokens: Tensor
    """[3] float64: all, those with replayed experts, and of these those that the router alone would send elsewhere"""

    @classmethod
    def zeros(cls, experts: int, device: torch.device) -> LayerLoad:
        one, three = torch.zeros(experts, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        return cls(one.to(device), one.to(device, copy=True), three.to(device))

    @torch.no_grad()
    def add(self, scores: Tensor, chosen: Tensor, replayed: Tensor | None, alone: Tensor, real: Tensor | None) -> None:
        """scores [T, E]; chosen, alone [T, k], with and without `replayed` [T] bool"""
        weight = torch.ones(len(scores), dtype=torch.float64, device=scores.device) if real is None else real.double()
        self.chosen.index_add_(0, chosen.flatten(), weight[:, None].expand(chosen.shape).flatten())
        self.probability += (probabilities(scores).double() * weight[:, None]).sum(0)
        self.tokens[0] += weight.sum()
        if replayed is not None:
            other = replayed & (chosen.sort(-1).values != alone.sort(-1).values).any(-1)
            self.tokens[1] += (weight * replayed).sum()
            self.tokens[2] += (weight * other).sum()


def replayed_choice(alone: Tensor, replayed: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the router's choice and the replayed one, each [T, k]: (experts [T, k], replayed [T] bool). A replayed row
    of k equal numbers is unknown: the router's own choice holds."""
    known = (replayed[:, :1] != replayed[:, 1:]).any(-1)
    return torch.where(known[:, None], replayed.to(alone.dtype), alone), known


def probabilities(scores: Tensor) -> Tensor:
    """[T, E] that routers choose by → their softmax: most have taken it already."""
    scores = scores.float()
    taken = (scores >= 0).all() & ((scores.sum(-1) - 1).abs() < 1e-3).all()
    return torch.where(taken, scores, scores.softmax(-1))


class _Mixture:
    """One layer's experts with their router: its forward is wrapped, in place."""

    def __init__(self, module: nn.Module, experts: int, per_token: int) -> None:
        self.experts, self.per_token = experts, per_token
        self.replayed: Tensor | None = None
        """[T, k]"""
        self.real: Tensor | None = None
        self.record: list[Tensor] | None = None
        self.load: LayerLoad | None = None
        self._plain = module.forward
        self.unwrap = _replace_forward(module, self._forward)

    @torch.compiler.disable
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.replayed is None and self.record is None and (self.load is None or not torch.is_grad_enabled()):
            return self._plain(*args, **kwargs)
        with _Choices(self):
            return self._plain(*args, **kwargs)

    def chosen(self, scores: Tensor, choice: Any) -> Any:
        """`choice`: what the router's topk over `scores` [T, E] gave."""
        alone = indices = choice.indices
        known: Tensor | None = None
        if self.replayed is not None:
            indices, known = replayed_choice(alone, self.replayed)
            choice = torch.return_types.topk((scores.gather(-1, indices), indices))
        if self.record is not None:
            self.record.append(indices)
        if self.load is not None and torch.is_grad_enabled():
            self.load.add(scores.detach(), indices, known, alone, self.real)
        return choice


class _Choices(TorchFunctionMode):
    """Takes over one mixture's `torch.topk`."""

    def __init__(self, mixture: _Mixture) -> None:
        super().__init__()
        self._mixture = mixture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            scores, mixture = args[0], self._mixture
            if result.indices.shape == (scores.shape[0], mixture.per_token) and scores.shape[1:] == (mixture.experts,):
                return mixture.chosen(scores, result)
        return result


class Routers:
    """The routers of one model, whose layers are wrapped in place."""

    def __init__(self, model: Any) -> None:
        """Raises `NoRouters` for a model without experts, or with one expert per token."""
        config = model.config.get_text_config()
        mixtures = [one for one in model.modules() if isinstance(getattr(one, "experts", None), nn.Module)]
        if not mixtures:
            raise NoRouters(f"{type(model).__name__} has no layers with experts")
        per_token = next((int(getattr(config, name)) for name in PER_TOKEN if getattr(config, name, None)), 0)
        if per_token < LEAST_PER_TOKEN:
            raise NoRouters(
                f"{type(model).__name__} has {per_token or 'an unknown number of'} experts per token, not 2 or more"
            )
        counts = {_count(one.experts) for one in mixtures}
        if len(counts) != 1 or 0 in counts:
            raise NoRouters(f"{type(model).__name__} has layers of {sorted(counts)} experts")
        self.mixtures = Mixtures(len(mixtures), counts.pop(), per_token)
        owners = _owners(model, mixtures)
        self._layers = [_Mixture(one, self.mixtures.experts, per_token) for one in mixtures]
        self._unwrap = [_replace_forward(owner, self._handing_on(owner.forward, numbers)) for owner, numbers in owners]

    def _handing_on(self, forward: Callable[..., Any], numbers: list[int]) -> Callable[..., Any]:
        """A decoder layer's forward, which takes `Routing` as one more argument: if it is computed again in a
        backward, it is called with the same one."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            routing: Routing = kwargs.pop(KEYWORD, None) or Routing()
            for number in numbers:
                layer = self._layers[number]
                layer.replayed = None if routing.experts is None else routing.experts[:, number]
                layer.real = routing.real
            try:
                return forward(*args, **kwargs)
            finally:
                for number in numbers:
                    self._layers[number].replayed = self._layers[number].real = None

        return wrapped

    def unwrap(self) -> None:
        """The model is as it was."""
        for undo in [*self._unwrap, *(layer.unwrap for layer in self._layers)]:
            undo()

    @contextmanager
    def recorded(self) -> Iterator[list[list[Tensor]]]:
        """Records the choices of the calls inside, by layer: [T, k] of each call."""
        records: list[list[Tensor]] = [[] for _ in self._layers]
        for layer, record in zip(self._layers, records, strict=True):
            layer.record = record
        try:
            yield records
        finally:
            for layer in self._layers:
                layer.record = None

    def rows(self, records: list[list[Tensor]]) -> NDArray[Any]:
        """The choices of one call of the model: [T, layers, k]"""
        choices: NDArray[Any] = torch.stack([record[0] for record in records], dim=1).cpu().numpy()
        return choices.astype(self.mixtures.dtype)

    def count_load(self, device: torch.device) -> None:
        """Count the load of forwards with gradients from now on."""
        for layer in self._layers:
            layer.load = LayerLoad.zeros(self.mixtures.experts, device)

    def take_load(self) -> list[LayerLoad]:
        """Returns the counts since the last call, by layer; empty if nothing is counted."""
        loads = [layer.load for layer in self._layers if layer.load is not None]
        if loads:
            self.count_load(loads[0].chosen.device)
        return loads

    @torch.no_grad()
    def check(self, model: Any, call: Callable[[dict[str, Any]], Tensor] | None = None) -> None:
        """Tries a model with weights: what its routers chose, replayed, gives the same logits, and other
        experts are chosen where those are replayed. Raises `NoRouters`.

        `call`: keyword arguments → logits of the model; None: as any caller.
        """
        words = min(model.config.get_text_config().vocab_size, 61)
        ids = torch.tensor([[one % words for one in TRIED]], device=model.device)
        run = call or (lambda arguments: model(input_ids=ids, use_cache=False, **arguments).logits)
        try:
            with self.recorded() as own:
                plain = run({})
            self._check_records(model, own)
            experts = torch.stack([record[0] for record in own], dim=1)
            others = (experts + 1) % self.mixtures.experts
            again = run({KEYWORD: Routing(experts)})
            with self.recorded() as replayed:
                run({KEYWORD: Routing(others)})
        except NoRouters:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise NoRouters(f"{type(model).__name__} does not run with replayed routes: {error}") from error
        self._check_records(model, replayed)
        if not torch.equal(torch.stack([record[0] for record in replayed], dim=1), others):
            raise NoRouters(f"{type(model).__name__} does not pass the replayed experts on to its layers")
        if not torch.allclose(plain, again, atol=1e-5, rtol=1e-4):
            raise NoRouters(f"{type(model).__name__} gives other logits where its routers' own choice is replayed")

    def _check_records(self, model: Any, records: list[list[Tensor]]) -> None:
        shapes = {tuple(one.shape) for record in records for one in record}
        calls = {len(record) for record in records}
        if calls != {1} or shapes != {(len(TRIED), self.mixtures.per_token)}:
            raise NoRouters(
                f"{type(model).__name__} does not choose {self.mixtures.per_token} of {self.mixtures.experts} experts "
                f"by torch.topk once in each of its {self.mixtures.layers} layers with experts"
            )


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replaces the forward of this module, not of its class; returns a function that restores it."""
    before = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def _count(experts: Any) -> int:
    """Number of experts: stacked in tensors of three dimensions, or a list of modules."""
    stacked = [one.shape[0] for one in experts.parameters(recurse=False) if one.dim() == 3]
    return int(stacked[0]) if stacked else len(list(experts.children()))


def _owners(model: Any, mixtures: list[nn.Module]) -> list[tuple[nn.Module, list[int]]]:
    """The decoder layers, and which of the mixtures each has: none may pass `Routing` on to its attention."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [one for one in model.modules() if type(one).__name__ in names]
    owners = [
        (one, [n for n, mixture in enumerate(mixtures) if any(part is mixture for part in one.modules())])
        for one in layers
    ]
    if sorted(number for _, numbers in owners for number in numbers) != list(range(len(mixtures))):
        raise NoRouters(f"{type(model).__name__} has experts outside of its decoder layers")
    return owners
