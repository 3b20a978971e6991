"""Tinker's protobuf messages, and what is in them as arrays.

The package `tinker_public` of the SDK 0.38, by its descriptor; fields that this server neither reads nor writes are
left out. Numbers on the wire are little endian, as the arrays of the machines that Python runs on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.service import Datum, Forward, LossCall

PROTOBUF = "application/x-protobuf"
SCHEMA = """
SampleResponse: 1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs
SampledSequence: 1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes
TopkLogprobs: 1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
Tensor: 1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*
BatchedTensor: 1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
ArrayRecord: 1 type_tag string, 2 fields map:BatchedTensor, 3 num_datums int64
ForwardBackwardOutput: 1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics map:double
ForwardBackwardRequest: 1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, \
5 loss_fn_config map:double, 6 forward_only bool, 7 loss_fn_config_v2 map:LossConfigValue
LossConfigValue: 1 number double, 2 text string
Datum: 1 model_input Chunk*, 2 loss_fn_inputs map:Tensor
Chunk: 1 encoded_text EncodedTextChunk, 2 image ImageChunk, 3 dmel DmelChunk
EncodedTextChunk: 1 tokens bytes
ImageChunk: 1 data bytes
DmelChunk: 1 dmel bytes
"""
"""A line per message: number, name and type of each field; ``*`` repeats it, ``map:`` is a map from strings."""
MOST_CELLS, MOST_SPARSE_CELLS = 1 << 26, 1 << 22
"""Numbers of a request, and of one sparse tensor that is written out: a short message must not ask for much memory."""
FLOAT32, INT64 = 1, 2
"""Values of the enum `DType` that requests have."""
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
STOP, LENGTH = 0, 1
"""Values of the enum `StopReason`."""


class BadMessage(ValueError):
    """A request that cannot be read, or has what this server does not train on."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A `ForwardBackwardRequest`."""

    model_id: str
    number: int
    data: Sequence[Datum]
    loss: LossCall
    forward_only: bool


@cache
def message_types() -> dict[str, Any]:
    """The class of each message by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="penstock_service.proto", package="tinker_public", syntax="proto3")
    lines = SCHEMA.strip().splitlines()
    names = [line.partition(":")[0] for line in lines]
    for line in lines:
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for number, field, kind in re.findall(r"(\d+) (\w+) ([\w:*]+)", fields):
            _add_field(message, names, int(number), field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker_public.{name}")) for name in names
    }


def _add_field(message: Any, names: Sequence[str], number: int, name: str, kind: str) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto

    added = message.field.add(name=name, number=number, label=Proto.LABEL_OPTIONAL)
    if kind.startswith("map:"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, names, 1, "key", "string")
        _add_field(entry, names, 2, "value", kind.removeprefix("map:"))
        kind, added.label = f"{message.name}.{entry.name}", Proto.LABEL_REPEATED
    if kind.endswith("*"):
        kind, added.label = kind.removesuffix("*"), Proto.LABEL_REPEATED
    if kind.partition(".")[0] in names:
        added.type, added.type_name = Proto.TYPE_MESSAGE, f".tinker_public.{kind}"
    else:
        added.type = Proto.Type.Value(f"TYPE_{kind.upper()}")


# requests ----------------------------------------------------------------------------------------------------------
def read_forward(body: bytes) -> ForwardCall:
    """Raises `BadMessage`. Shapes and ids are not checked against a model or a loss."""
    from google.protobuf.message import DecodeError

    request = message_types()["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise BadMessage(f"the body is no ForwardBackwardRequest of protobuf: {error}") from error
    options = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.text:
            raise BadMessage(f"loss_fn_config.{name} is text, and no loss of this server takes any")
        options[name] = value.number
    data: list[Datum] = []
    cells = 0
    for number, datum in enumerate(request.data):
        try:
            data.append(_datum(datum))
        except ValueError as error:
            raise BadMessage(f"datum {number}: {error}") from error
        cells += data[-1].targets.size * (1 + len(data[-1].inputs))
        if cells > MOST_CELLS:
            raise BadMessage(f"datum {number}: the tensors up to here have more than {MOST_CELLS} numbers")
    call = LossCall(request.loss_fn, options)
    return ForwardCall(request.model_id, request.seq_id, data, call, request.forward_only)


def _datum(datum: Any) -> Datum:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise BadMessage("model_input has an image or sound, and this server trains on text alone")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4").astype(np.int64))
    tensors = {name: _array(name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    if "target_tokens" not in tensors:
        raise BadMessage("loss_fn_inputs lacks target_tokens")
    targets = tensors.pop("target_tokens")
    if targets.dtype != np.int64:
        raise BadMessage("target_tokens is not of dtype int64")
    inputs = {name: one.astype(np.float32) for name, one in tensors.items()}
    return Datum(np.concatenate([np.zeros(0, np.int64), *parts]), targets, inputs)


def _array(name: str, tensor: Any) -> NDArray[Any]:
    """Raises `BadMessage` where shape and bytes disagree."""
    if tensor.dtype not in DTYPES:
        raise BadMessage(f"{name} is neither of dtype float32 nor of int64")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if len(shape) not in (1, 2) or any(size < 0 for size in shape):
        raise BadMessage(f"{name} has shape {list(shape)}: one or two dimensions are needed")
    if tensor.HasField("sparse_csr"):
        return _dense(name, tensor.sparse_csr, shape, dtype)
    values = np.frombuffer(tensor.dense, dtype)
    if values.size != int(np.prod(shape, dtype=object)):
        raise BadMessage(f"{name} has {values.size} numbers, and shape {list(shape)}")
    return values.reshape(shape)


def _dense(name: str, csr: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    values = np.frombuffer(csr.values, dtype)
    rows, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    fits = (
        len(shape) == 2
        and shape[0] * shape[1] <= MOST_SPARSE_CELLS
        and len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(values) == len(columns)
        and bool((np.diff(rows) >= 0).all())
        and (not len(columns) or 0 <= int(columns.min()) <= int(columns.max()) < shape[1])
    )
    if not fits:
        raise BadMessage(f"{name}: its sparse indices do not fit shape {list(shape)}")
    whole = np.zeros(shape, dtype)
    whole[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return whole


# results -----------------------------------------------------------------------------------------------------------
def write_forward(result: Forward) -> bytes:
    """A `ForwardBackwardOutput`. Metrics are named ``name:reduction``: the client adds up the parts of one call."""
    output = message_types()["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", metrics={"loss:sum": result.loss}
    )
    for logprobs in _alike(result.logprobs):
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(one.astype("<f4").tobytes() for one in logprobs)
        tensor.offsets = np.cumsum([0, *(4 * one.size for one in logprobs)]).astype("<i8").tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(logprobs[0].shape[1:])
    written: bytes = output.SerializeToString()
    return written


def _alike(logprobs: Sequence[NDArray[np.float32]]) -> list[list[NDArray[np.float32]]]:
    """Consecutive arrays of one width: a record has one."""
    groups: list[list[NDArray[np.float32]]] = []
    for one in logprobs:
        if groups and groups[-1][0].shape[1:] == one.shape[1:]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    """True if a stop token or text ended it, False if its length did."""


def write_sample(sequences: Sequence[SampledTokens], prompt_logprobs: NDArray[np.float32] | None) -> bytes:
    """A `SampleResponse`. `prompt_logprobs` are those of the prompt's tokens but the first, which has none."""
    response = message_types()["SampleResponse"]()
    for one in sequences:
        response.sequences.add(
            stop_reason=STOP if one.stopped else LENGTH,
            tokens=np.array(one.token_ids, "<i4").tobytes(),
            logprobs=np.array(one.logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.concatenate([[np.nan], prompt_logprobs]).astype("<f4").tobytes()
    written: bytes = response.SerializeToString()
    return written
