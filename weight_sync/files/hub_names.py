"""The names and forms that a transformers model's tensors have in its files on the hub.

transformers keeps some parameters in another form than the files. All experts of a layer are one parameter:

    in memory   model.layers.0.mlp.experts.gate_up_proj                             [E, 2I, H]
    in files    model.layers.0.mlp.experts.N.gate_proj.weight, ….N.up_proj.weight   [I, H] each, N in 0 … E − 1

    split   a parameter, or the rows of some experts ─► its tensors in the files: for publishing and saving
    join    tensors of the files ─► the parameter, or the rows of some experts: for loading

Engines and hubs know the files' names only. The arithmetic is transformers' own, by which it loads and saves models;
here it converts one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UnmappedTensors(ValueError):
    """A model's parameters and its files' tensors do not correspond one to one; the message names a tensor."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The tensors in the files of which one parameter is made."""

    names: tuple[str, ...]
    """Names in the order in which transformers joins the tensors."""
    patterns: tuple[str, ...] = ()
    """Pattern of transformers' conversion that each name matches; empty if only the name changes."""

    @property
    def renamed_only(self) -> bool:
        return not self.patterns


@dataclass
class HubNames:
    """The names of one model's tensors in its files. `of` makes it; afterwards the model is not needed, and may
    be sharded or have adapters.
    """

    parts: dict[str, StoredParts]
    """Parts by the names of `model.state_dict()`, if the files have tensors under the parameter's own name."""
    tied: dict[str, str]
    """Other names of tied parameters that the files have once → the name in `parts`."""
    tied_twice: frozenset[str]
    """Tied parameters that the files have more than once; transformers unties them where values differ."""
    missing: frozenset[str]
    """Parameters that the files lack and that are tied to no other: they cannot be loaded."""
    unexpected: frozenset[str]
    """Tensors of the files that belong to no parameter."""
    ignored: frozenset[str]
    """Parameters that the files lack and that the model itself initialises."""
    _converters: dict[str, Any] = field(repr=False)
    """Transformers' conversion from the files' form, by parameter."""
    _reverse: Any = field(repr=False)
    """Attributes of a model that `revert_weight_conversion` reads."""

    @classmethod
    def of(cls, model: PreTrainedModel, stored: Iterable[str] | None = None) -> HubNames:
        """`model`: on any device, meta too, without adapters. `stored`: names of the tensors in its files; None:
        those under which transformers would save it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
            revert_weight_conversion,
        )

        state = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        stored_by_name: dict[str, list[tuple[str, str | None]]] = {}
        unexpected = set()
        if stored is None:
            stored = revert_weight_conversion(model, {name: one.detach().to("meta") for name, one in state.items()})
        for name in sorted(stored, key=dot_natural_key):
            ours, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            if ours not in state and name in state:
                ours, pattern = name, None
            if pattern is not None and len(by_pattern[pattern].target_patterns) > 1:
                parameters = ", ".join(by_pattern[pattern].target_patterns)
                raise UnmappedTensors(f"tensor {name} of its files is several parameters of the model: {parameters}")
            if ours in state:
                stored_by_name.setdefault(ours, []).append((name, pattern))
            else:
                unexpected.add(name)
        tied, tied_twice = _tied(model, stored_by_name)
        missing = set(state) - stored_by_name.keys() - tied.keys()
        lacking: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
        before = frozenset(lacking.missing_keys)
        model._adjust_missing_and_unexpected_keys(lacking)
        parts = {name: _parts(pairs) for name, pairs in stored_by_name.items()}
        used = [one for one in mapping if one.was_used()]
        return cls(
            parts,
            tied,
            tied_twice,
            missing=frozenset(lacking.missing_keys),
            unexpected=frozenset(lacking.unexpected_keys),
            ignored=before - frozenset(lacking.missing_keys),
            _converters={name: by_pattern[one.patterns[0]] for name, one in parts.items() if one.patterns},
            _reverse=SimpleNamespace(_weight_conversions=used or None, config=model.config),
        )

    def check(self, state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Raises `UnmappedTensors` where a parameter could not be written back: under other names than it was read
        from, or, where `shapes` of the files are given, in other shapes. `state`: of the model, on any device."""
        for name, parts in self.parts.items():
            shapes_by_name = {
                stored: tuple(tensor.shape) for stored, tensor in self.split(name, state[name].detach().to("meta"))
            }
            if shapes_by_name.keys() != set(parts.names):
                stray = min(shapes_by_name.keys() ^ set(parts.names))
                raise UnmappedTensors(f"parameter {name} would be written back as other tensors: {stray} differs")
            for stored, shape in shapes_by_name.items():
                if shapes is not None and tuple(shapes[stored]) != shape:
                    raise UnmappedTensors(
                        f"tensor {stored} has shape {list(shapes[stored])} in the files, the model's is {list(shape)}"
                    )

    def parts_of(self, name: str) -> StoredParts:
        """Raises `KeyError` for what the files lack."""
        return self.parts[self.tied.get(name, name)]

    def stored_name(self, name: str) -> str | None:
        """Return the name in the files of a parameter that they have whole, in the model's form; None if they have it
        in parts.
        """
        parts = self.parts.get(self.tied.get(name, name))
        if parts is None:
            return name
        return parts.names[0] if parts.renamed_only else None

    def split(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the files, tensor in their form) of a whole parameter. Views of `tensor` if that is possible."""
        if (stored := self.stored_name(name)) is not None:
            yield stored, tensor
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self._reverse, {name: tensor}).items()

    def split_experts(self, name: str, rows: torch.Tensor, first: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `split` of the experts `first`, `first` + 1, … alone: views of `rows`, which are theirs of a parameter
        that has `experts`."""
        stored = self.experts(name)
        assert stored is not None, f"the rows of {name} are not made of tensors of their own"
        _, *joined = self._converters[name].operations
        for row, names in zip(rows, stored[first : first + len(rows)], strict=True):
            yield from zip(names, row.chunk(len(names), joined[0].dim - 1) if joined else [row], strict=True)

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The parameter from `tensors` of the files. Where `experts` has some of the rows, from those rows' tensors
        alone: the parameter's rows of these experts."""
        parts = self.parts_of(name)
        if parts.renamed_only:
            return tensors[parts.names[0]]
        converter = deepcopy(self._converters[name])
        for stored, pattern in zip(parts.names, parts.patterns, strict=True):
            if stored in tensors:
                converter.add_tensor(name, stored, pattern, tensors[stored])
        value = converter.convert(name, config=self._reverse.config)[name]
        whole: torch.Tensor = value[0] if isinstance(value, list) else value
        return whole

    def joined(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` of the files under the model's names and in its form; what is not a tensor of the files, and
        parameters of which a part is missing, stay as they are."""
        rest, parameters = dict(tensors), {}
        for name, parts in self.parts.items():
            if parts.names != (name,) and all(stored in rest for stored in parts.names):
                parameters[name] = self.join(name, {stored: rest.pop(stored) for stored in parts.names})
        return rest | parameters

    def experts(self, name: str) -> list[tuple[str, ...]] | None:
        """Return the tensors of the files that make each row of the parameter's first dimension; None if rows are not
        made of separate tensors."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        parts = self.parts[name]
        if parts.renamed_only:
            return None
        first, *others = self._converters[name].operations
        stacked = isinstance(first, MergeModulelist) and first.dim == 0
        if not stacked or len(others) > 1 or not all(isinstance(one, Concatenate) and one.dim > 0 for one in others):
            return None
        columns: dict[str, list[str]] = {}
        for stored, pattern in zip(parts.names, parts.patterns, strict=True):
            columns.setdefault(pattern, []).append(stored)
        return list(zip(*columns.values(), strict=True))


def _parts(pairs: list[tuple[str, str | None]]) -> StoredParts:
    names = tuple(name for name, _ in pairs)
    patterns = tuple(pattern for _, pattern in pairs if pattern is not None)
    if len(patterns) not in (0, len(names)) or (not patterns and len(names) > 1):
        raise UnmappedTensors(f"tensors {', '.join(names[:3])} are the same parameter")
    return StoredParts(names, patterns)


def _tied(model: PreTrainedModel, stored_by_name: Mapping[str, Any]) -> tuple[dict[str, str], frozenset[str]]:
    """`HubNames.tied` and `HubNames.tied_twice`"""
    families: dict[str, set[str]] = {}
    for target, source in (model.all_tied_weights_keys or {}).items():
        families.setdefault(source, {source}).add(target)
    once: dict[str, str] = {}
    twice: set[str] = set()
    for family in families.values():
        stored = sorted(family & stored_by_name.keys())
        twice |= set(stored[1:])
        once |= {name: stored[0] for name in family - stored_by_name.keys() if stored}
    return once, frozenset(twice)
