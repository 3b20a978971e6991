"""Whether a segment may be stored: a quick look that accepts nearly all, and the exact rules that name what is wrong.

`_is_plain` is true only where the rules hold; where it is false the rules decide. So the quick look may know fewer
good segments than there are (other dtypes, very many spans), never more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue.queue import BadPayload
from penstock.transfer_queue.trajectory import Segment

_I4, _U4, _F4, _U1 = (np.dtype(name) for name in ("<i4", "<u4", "<f4", "u1"))
_FEW_SPANS = 2048
"""Up to here one memchr per span is quicker than counting covers position by position."""


def check_segment(segment: Segment, min_version: int, where: str) -> None:
    """Raise `BadPayload`: lengths, mask of 0 and 1, finite logprobs, spans that cover exactly the sampled tokens.

    `min_version` is the oldest policy version that may have sampled; `where` names the segment in messages.
    """
    if not _is_plain(segment, max(min_version, 0)):
        _refuse_bad(segment, min_version, where)


def expect(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise BadPayload(f"{field}: {problem}")


# the quick look ------------------------------------------------------------------------------------------------------
def _is_plain(segment: Segment, floor: int) -> bool:
    ids, mask, logprobs = segment.response_ids, segment.response_mask, segment.response_logprobs
    return (
        _are_ids(segment.prompt_ids)
        and _are_ids(ids)
        and _is_row(mask, _U1, len(ids))
        and (not len(ids) or int(np.maximum.reduce(mask)) <= 1)
        and _is_row(logprobs, _F4, len(ids))
        and bool(np.logical_and.reduce(np.isfinite(logprobs)))
        and _are_turns(segment.turn_starts, len(ids))
        and _cover(segment.version_spans, mask, floor)
    )


def _is_row(values: Any, dtype: np.dtype[Any], length: int) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == dtype and values.shape == (length,)


def _are_ids(values: Any) -> bool:
    if not (isinstance(values, np.ndarray) and values.dtype == _I4 and values.ndim == 1):
        return False
    return not values.size or int(np.maximum.reduce(values.view(_U4))) < 2**31  # a negative id has the highest bit


def _are_turns(starts: Any, length: int) -> bool:
    if not (isinstance(starts, np.ndarray) and starts.dtype == _I4 and starts.ndim == 1):
        return False
    found = starts.tolist()
    return not found or (found[0] >= 0 and found[-1] <= length and found == sorted(found))


def _cover(spans: Any, mask: NDArray[np.uint8], floor: int) -> bool:
    """Whether the spans, in order and apart, have only sampled positions inside and as many as there are."""
    if not (isinstance(spans, np.ndarray) and spans.dtype == _I4 and spans.ndim == 2 and spans.shape[1] == 3):
        return False
    if len(spans) > _FEW_SPANS:
        return False
    raw, at, sampled = mask.tobytes(), 0, 0
    for version, start, end in spans.tolist():
        if version < floor or not at <= start < end <= len(raw) or raw.find(0, start, end) >= 0:
            return False
        at, sampled = end, sampled + end - start
    return sampled == np.count_nonzero(mask.view(np.bool_))


# the rules -----------------------------------------------------------------------------------------------------------
def _refuse_bad(segment: Segment, min_version: int, where: str) -> None:
    for name in ("prompt_ids", "response_ids", "turn_starts"):
        _check_ids(np.asarray(getattr(segment, name)), f"{where}.{name}")
    length = len(segment.response_ids)
    mask, logprobs = np.asarray(segment.response_mask), np.asarray(segment.response_logprobs)
    for name, values in (("response_mask", mask), ("response_logprobs", logprobs)):
        expect(values.shape == (length,), f"{where}.{name}", f"shape {values.shape}, response_ids has {length}")
    _check_mask(mask, f"{where}.response_mask")
    _check_logprobs(logprobs, f"{where}.response_logprobs")
    _check_turns(np.asarray(segment.turn_starts), length, f"{where}.turn_starts")
    _check_spans(np.asarray(segment.version_spans), mask, min_version, f"{where}.version_spans")


def _check_ids(array: NDArray[Any], field: str) -> None:
    expect(array.ndim == 1, field, f"has {array.ndim} dimensions, 1 expected")
    _check_integers(array, field)
    expect(array.size == 0 or int(array.min()) >= 0, field, "holds negative values")


def _check_integers(array: NDArray[Any], field: str) -> None:
    """Values outside of int32 would be stored as other numbers."""
    expect(array.size == 0 or array.dtype.kind in "iu", field, f"dtype {array.dtype}, integers expected")
    expect(array.size == 0 or int(array.max()) < 2**31, field, "holds values over int32")


def _check_mask(mask: NDArray[Any], field: str) -> None:
    expect(mask.size == 0 or mask.dtype.kind in "biuf", field, f"dtype {mask.dtype}, numbers expected")
    expect(bool(((mask == 0) | (mask == 1)).all()), field, "holds other values than 0 and 1")


def _check_logprobs(logprobs: NDArray[Any], field: str) -> None:
    expect(logprobs.size == 0 or logprobs.dtype.kind in "fiu", field, f"dtype {logprobs.dtype}, floats expected")
    with np.errstate(over="ignore"):
        stored = logprobs.astype(_F4)  # a finite float64 may be over what is stored
    expect(bool(np.isfinite(stored).all()), field, "holds NaN or infinite values")


def _check_turns(starts: NDArray[Any], length: int, field: str) -> None:
    expect(bool((starts <= length).all()), field, f"points behind the response of {length} tokens")
    expect(bool((starts[1:] >= starts[:-1]).all()), field, "is not in order")


def _check_spans(spans: NDArray[Any], mask: NDArray[Any], min_version: int, field: str) -> None:
    expect(spans.size == 0 or (spans.ndim == 2 and spans.shape[1] == 3), field, f"shape {spans.shape}, not [S, 3]")
    _check_integers(spans, field)
    rows = spans.reshape(-1, 3)
    versions, starts, ends = rows.T
    for version, start, end in rows[(starts < 0) | (starts >= ends) | (ends > len(mask))][:1]:
        raise BadPayload(f"{field}: span {start} to {end} of version {version} is outside of 0 to {len(mask)}")
    oldest = int(versions.min(initial=max(min_version, 0)))
    expect(oldest >= 0, field, f"version {oldest} is negative")
    expect(oldest >= min_version, field, f"version {oldest} is below the lease's floor {min_version}")
    _check_cover(starts.astype(np.int64), ends.astype(np.int64), mask, field)


def _check_cover(starts: NDArray[Any], ends: NDArray[Any], mask: NDArray[Any], field: str) -> None:
    size = len(mask) + 1
    covered = np.cumsum(np.bincount(starts, minlength=size) - np.bincount(ends, minlength=size))[:-1]
    wrong = np.flatnonzero(covered != mask)
    if len(wrong):
        at = int(wrong[0])
        raise BadPayload(f"{field}: response position {at} (mask {mask[at]}) is covered by {covered[at]} spans")
