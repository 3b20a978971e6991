"""Runs INSIDE vLLM's workers: takes a version of the weights from files or a broadcast, all of it or nothing.

One update is one session of vLLM's weight-transfer routes, driven by `VLLMWeights`:

    /start_weight_update                             nothing is touched
    /update_weights {manifest…, "phase": "fetch"}    a thread maps the version's file, which the first process of the
                                                     machine that asks for it reads and verifies (`WeightReader`);
                                                     the call returns, decoding continues
                                                     how it ended is a file in the folder `report`
    /pause
    /update_weights {manifest…, "phase": "load"}     takes the thread's result: loads it, or raises WeightsRefused
    /finish_weight_update {"weight_version": …}      the label
    /resume                                          the thread compares what the layers hold with that copy; the
                                                     verdict is a file in the folder `report` of that call

A broadcast is received before its version is announced, in a session that loads nothing or in that of another version's
load, which it leaves as it is. The server's first worker receives it, into shared memory that the fetch above maps in
all workers; if it is the only one, into private memory, whose large pages cost a tenth of what shared ones do:

    /update_weights {"phase": "stage", offer…}       a thread receives; the call returns, decoding continues
                                                     the state that came is a file in the folder `report`

Where broadcasts are received in place, every worker receives, into its own parameters (`in_place`):

    /update_weights {"phase": "join", offer…}        a thread joins the group; the call returns, decoding continues
                                                     whether it could is a file in the folder `report`
    /pause
    /update_weights {"phase": "receive"}             returns when the broadcast has ended
                                                     the state that came is a file in the folder `report`
    /finish_weight_update                            without a label: the version is not announced yet

vLLM's layer-wise reload replaces parameters by placeholders as soon as it begins, so it begins only after every byte
was verified: a refused version leaves the old weights as they were. Each worker loads full tensors through the model's
own `load_weights`, which keeps this rank's share: tensor parallelism needs nothing here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from penstock.common import write_atomically
from penstock.rollout_server.engines.verify_loaded import Sample, compare_excerpts, compare_held
from penstock.rollout_server.engines.vllm.in_place import InPlaceWorker
from penstock.rollout_server.engines.vllm_plugin import BROKEN, LOST, REFUSED
from penstock.weight_sync import (
    Manifest,
    MappedVersion,
    Offer,
    StagedMemory,
    StagedWeights,
    WeightReader,
    WeightsBroken,
    WeightsRefused,
    WeightsUnreachable,
)

Tensors = Mapping[str, torch.Tensor]
_OUTPUT_HEAD = "lm_head.weight"
logger = init_logger(f"vllm.{__name__}")
"""vLLM shows its own loggers only."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Empty: each update contains the path of its file."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A version, and which half of its update this is."""

    manifest: dict[str, Any]
    """`Manifest.as_dict`, with a path."""
    phase: Literal["fetch", "load", "stage", "join", "receive"]
    workers: int
    """Workers of the server, over all of its data-parallel engines: in a worker of a model without experts vLLM's
    configuration says that there is one engine."""
    report: str = ""
    """Folder in which each worker says, by a file of its process number, how its reading (of the phase ``fetch``), its
    comparison (of ``load``) or its part of a broadcast ended: what is wrong, or nothing, or what came. vLLM's routes
    have no answer that could say it while decoding continues, and an error of one rank stays in the others' queues."""
    offer: dict[str, Any] | None = None
    """`Offer.as_dict`, of the phases ``stage`` and ``join``."""


class FileWeightEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM's side of all transports. vLLM calls it from one thread."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._weights = WeightReader()
        self._staged: StagedMemory | StagedWeights | None = None
        self._in_place = InPlaceWorker()
        self._fetched: tuple[Manifest, Future[Tensors]] | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Files need no rendezvous."""

    def start_weight_update(self) -> None:
        """Touches nothing: the layer-wise reload waits for verified bytes."""
        self._fetched = None
        self._in_place.leave()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class would wait for the whole device: in each phase, and for a broadcast under way there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """One phase. Raises `WeightsRefused` before anything is touched where the bytes of a load do not verify."""
        report = Path(update_info.report)
        if self._staged is None:  # other workers map what the first one receives
            self._staged = StagedWeights() if update_info.workers == 1 else StagedMemory()
        if update_info.phase == "stage":
            if self._receives:
                self._receiver.submit(self._stage, Offer.parse(update_info.offer), report)
            return
        if update_info.phase == "join":
            self._join(Offer.parse(update_info.offer), report)
            return
        if update_info.phase == "receive":
            _say(report, self._receive_in_place())
            return
        manifest = Manifest.parse(update_info.manifest)
        if update_info.phase == "fetch":
            self._fetch(manifest, update_info.report)
        else:
            self._load(manifest.version, self._take_fetched(manifest), update_info.report)

    def finish_weight_update(self) -> None:
        """The layers are finalised: `receive_weights` leaves no half-loaded ones. A group that was joined for nothing
        is left."""
        self._in_place.leave()

    def shutdown(self) -> None:
        """vLLM ends the worker."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._weights.forget()
        self._receiver.shutdown(wait=False, cancel_futures=True)
        self._in_place.shutdown()

    @property
    def _receives(self) -> bool:
        """This worker takes part in broadcasts, for all of the server's."""
        return not self.parallel_config.rank and not self.parallel_config.data_parallel_index

    def _stage(self, offer: Offer, report: Path) -> None:
        assert self._staged is not None
        verdict = f"{LOST}this worker could not receive"
        try:
            verdict = self._staged.receive(offer, device=self.device)
        except WeightsUnreachable as error:
            verdict = f"{LOST}{error}"
        finally:
            _say(report, verdict)

    def _join(self, offer: Offer, report: Path) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._in_place.join(offer, worker, self.device, lambda problem: _say(report, problem and f"{LOST}{problem}"))

    def _receive_in_place(self) -> str:
        """Returns the report for the sidecar. Raises `RuntimeError` if the layers hold other values than it."""
        try:
            received = self._in_place.receive(self._reload)
        except WeightsUnreachable as error:
            return f"{LOST}{error}"
        except WeightsBroken as error:
            return f"{BROKEN}{error}"
        forms, rows = (
            by_engine_name(self.model, received.excerpts.forms),
            by_engine_name(self.model, received.excerpts.rows),
        )
        comparison = compare_excerpts(self.model.named_parameters(), forms, rows)
        if comparison.different:
            raise RuntimeError(f"parameter {comparison.different} holds other values than were received in place")
        counts = comparison.equal, comparison.incomparable, comparison.reasons_text
        logger.info("received in place: %d parameters begin as it, %d cannot be compared%s", *counts)
        return received.state

    def _fetch(self, manifest: Manifest, report: str = "") -> Future[Tensors]:
        future = self._reader.submit(self._read, manifest, report)
        self._fetched = (manifest, future)
        return future

    def _read(self, manifest: Manifest, report: str) -> Tensors:
        refused = ""
        try:
            # What a sidecar has fetched is a file, whatever it was announced as.
            by_file = manifest.transport != "broadcast"
            return self._weights.read(manifest) if by_file else self._received(manifest)
        except WeightsRefused as error:
            refused = str(error)
            raise
        except WeightsUnreachable as error:
            refused = f"{LOST}{error}"
            raise
        finally:
            if report:
                _say(Path(report), refused)

    def _received(self, manifest: Manifest) -> Tensors:
        """The version that this machine's receiving worker holds."""
        if isinstance(self._staged, StagedWeights):
            return self._staged.take(manifest)
        if not self._receives:
            return self._weights.shared(manifest)
        assert self._staged is not None
        version = self._staged.take(manifest)
        self._weights.share(manifest, version)
        return version

    def _take_fetched(self, manifest: Manifest) -> Tensors:
        fetched, future = self._fetched or (None, None)
        if future is None or fetched != manifest:
            future = self._fetch(manifest)
        self._fetched = None  # where no deltas follow, the mapped copy goes with the comparison
        try:
            return future.result()
        except WeightsRefused as error:
            raise WeightsRefused(REFUSED + str(error)) from error

    def _load(self, version: int, tensors: Tensors, report: str) -> None:
        self._reload(tensors.items())
        if torch.accelerator.is_available():  # vLLM's stream is none that a thread's would wait for
            torch.accelerator.current_stream().synchronize()
        # After the fetch, before the next one: nothing changes `tensors` or the parameters meanwhile.
        self._reader.submit(self._compare, version, tensors, report)

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replaces the parameters. If `tensors` break off, layers have old or new values, or parts of both, and no
        placeholder stays: the next request, or the next load, would end vLLM."""
        initialize_layerwise_reload(self.model)
        try:
            # One parameter under two names: loaded twice it would count twice, and its layer be complete too early.
            tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            self.model.load_weights(((name, tensor) for name, tensor in tensors if not (tied and name == _OUTPUT_HEAD)))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_heads(self.model)
            repack_experts(self.model)

    def _compare(self, version: int, tensors: Tensors, report: str) -> None:
        if isinstance(tensors, MappedVersion):
            try:
                tensors.check_unchanged()
            except WeightsRefused as error:
                _say(Path(report), f"cannot say what it holds: {error}")
                return
        say_what_differs(self.model, version, tensors, report)


def _say(folder: Path, text: str) -> None:
    """Whole or not at all: the sidecar may look at any moment. It removes the folder when it has given up."""
    with contextlib.suppress(FileNotFoundError):
        write_atomically(folder / str(os.getpid()), text)


def say_what_differs(model: torch.nn.Module, version: int, tensors: Tensors, report: str) -> None:
    """Compare this worker's weights with the published version, in the reader's thread, while decoding continues.

    It says so in the folder `report`: the sidecar hands on what is sampled once all workers have, and ends them all
    where one does not. It is not for this worker to end itself: vLLM's routes then never answer a call under way.
    """
    verdict = ""
    try:
        sample = Sample.of(version, next(model.parameters()).device)
        comparison = compare_held(model.named_parameters(), by_engine_name(model, tensors), sample)
    except RuntimeError:  # torch's own, of a dtype that it cannot compare; the weights are no worse for it
        logger.exception("version %d: what this worker holds could not be compared", version)
    except BaseException as error:  # a verdict must come, or the sidecar would wait for it until its deadline
        verdict = f"could not compare what it holds: {error!r}"
        raise
    else:
        if comparison.different:
            logger.critical("version %d: parameter %s holds other values", version, comparison.different)
            verdict = f"holds other values in parameter {comparison.different}"
        else:
            counts = version, comparison.equal, comparison.incomparable, comparison.reasons_text
            logger.info("version %d: %d parameters hold it, %d cannot be compared%s", *counts)
    finally:
        _say(Path(report), verdict)


class RenamedTensors(Mapping[str, torch.Tensor]):
    """`tensors` under other names, read when they are asked for."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        """`names`: the new one of → the old one."""
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def by_engine_name(model: Any, tensors: Tensors) -> Tensors:
    """A model that sees has its text model and its tower under names of vLLM's own: without this none of them would be
    compared. Other models keep the names of their files."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None or not hasattr(model, "visual"):
        return tensors
    mapped = ((mapper.map_name(name), name) for name in tensors)
    return RenamedTensors(tensors, {new: old for new, old in mapped if new is not None})


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Packs the output head again if it is the embedding: the CPU build multiplies by a packed COPY of it.

    Layer-wise reload loads the shared parameter under the embedding's name and leaves the head's copy as it was:
    without this the new version's hidden states meet the old version's head, and nothing says so. GPUs have no copy.
    """
    modules: list[Any] = list(model.modules())
    shared = {module.weight.data_ptr() for module in modules if type(module) is VocabParallelEmbedding}
    for module in modules:
        packed = isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
        if packed and module.weight.data_ptr() in shared:
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: torch.nn.Module) -> None:
    """On CPUs a layer's experts are multiplied in a packed form, which vLLM makes at the first load only.

    Layer-wise reload copies the new values, unpacked, over the packed ones: without this the layer would compute with
    values in the wrong places, and nothing says so. GPUs keep the form that reload makes.
    """
    if not current_platform.is_cpu():
        return
    modules: list[Any] = list(model.modules())
    for module in modules:
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
