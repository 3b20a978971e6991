"""A version's file as SGLang is given it, and the checksums that it must tell; no SGLang is needed here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import small_config
from tests.rollout_server.engines.stand_ins import check_sglang

from penstock.rollout_server import EngineError
from penstock.weight_sync import WeightsRefused

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.torch

from penstock.rollout_server.engines.http.server_process import Installation
from penstock.rollout_server.engines.sglang.checksums import device_checksum
from penstock.rollout_server.engines.sglang.weights import (
    SGLangWeights,
    VersionReader,
    shown_as_folder,
)
from penstock.weight_sync import WeightPublisher


def sha(*rows: list[float]) -> str:
    return hashlib.sha256(torch.tensor(rows).numpy().tobytes()).hexdigest()[:16]


class Ranks:
    """In place of a server of two ranks: each holds the norm whole and half of the matrix."""

    name, folder = "SGLang", Path()
    installation = Installation("python", "0.5.23", cpu=True)

    def __init__(self, norms: tuple[float, float], matrix: list[float]) -> None:
        self.norms, self.matrix = norms, matrix
        self.asked: list[dict[str, Any]] = []

    async def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        check_sglang(path, body)
        self.asked.append(body)
        held = [{"norm": sha([norm]), "w": sha([half])} for norm, half in zip(self.norms, self.matrix, strict=True)]
        return {"ranks": [{"checksums": {} if body.get("skip_tensor_list") else one} for one in held]}


async def weights_on(server: Any, folder: Path) -> tuple[SGLangWeights, list[str]]:
    save_file({"norm": torch.tensor([1.0]), "w": torch.tensor([1.0, 2.0])}, folder / "model.safetensors")
    weights = SGLangWeights(small_config(engine="sglang"), str(folder), server, set())
    return weights, await weights._look()


async def test_what_each_rank_holds_whole_is_compared_on_each(tmp_path: Path) -> None:
    server = Ranks((1.0, 1.0), [1.0, 2.0])
    weights, limits = await weights_on(server, tmp_path)
    assert weights.checked == ["norm"]
    assert limits[0].startswith("what 1 of 2 parameters hold is verified after loading")
    server.norms = (5.0, 5.0)
    manifest = publish(tmp_path / "published").write(1, [("norm", torch.tensor([5.0]))])
    _, version = VersionReader().read(manifest)
    await weights._verify((tmp_path, {"norm": sha([5.0])}, version))
    server.norms = (5.0, 1.0)
    with pytest.raises(EngineError, match="rank 1 of SGLang loaded other values than the version has in norm"):
        await weights._verify((tmp_path, {"norm": sha([5.0])}, version))


class OnGpu(Ranks):
    """One rank on a GPU, which takes sums by SGLang's kernel there."""

    installation = Installation("python", "0.5.23", cpu=False)

    async def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        check_sglang(path, body)
        values = {"norm": [self.norms[0]], "w": self.matrix}
        sums = {name: device_checksum(torch.tensor(held).numpy().view("u1")) for name, held in values.items()}
        return {"ranks": [{"checksums": sums}]}


async def test_loads_on_a_gpu_are_verified(tmp_path: Path) -> None:
    server = OnGpu((1.0, 1.0), [1.0, 2.0])
    weights, limits = await weights_on(server, tmp_path)
    assert (weights.checked, limits) == (["norm", "w"], [])
    publisher, verified = publish(tmp_path / "published"), set[str]()
    for number in range(1, 17):
        server.norms, server.matrix = (float(number), 0.0), [0.5, float(number)]
        tensors = [("norm", torch.tensor([float(number)])), ("w", torch.tensor(server.matrix))]
        file, expected, version = weights._read(publisher.write(number, tensors))
        os.close(file)
        assert expected, "of fewer parameters than sixteen, each version verifies one"
        await weights._verify((tmp_path, expected, version))
        verified |= expected.keys()
        if "w" in expected:
            server.matrix = [0.5, -1.0]
            with pytest.raises(EngineError, match="loaded other values than the version has in w"):
                await weights._verify((tmp_path, expected, version))
    assert verified == {"norm", "w"}, "sixteen versions verify all of them"


async def test_ranks_are_waited_for_where_nothing_can_be_compared(tmp_path: Path) -> None:
    server = Ranks((7.0, 7.0), [1.0, 2.0])  # as if it hashed otherwise
    weights, limits = await weights_on(server, tmp_path)
    assert limits == ["weights are verified before loading only: this SGLang's checksums cannot be computed here"]
    manifest = publish(tmp_path / "published").write(1, [("w", torch.tensor([1.0, 2.0]))])
    _, version = VersionReader().read(manifest)
    await weights._verify((tmp_path, {}, version))
    assert server.asked == [{"action": "checksum"}, {"action": "checksum", "skip_tensor_list": [""]}]
    Path(manifest.place).write_bytes(Path(manifest.place).read_bytes())
    with pytest.raises(EngineError, match="was changed after it was verified"):
        await weights._verify((tmp_path, {}, version))


def publish(folder: Path) -> WeightPublisher:
    return WeightPublisher(folder, "shm", keep=2, full_every=2)


def shown(file: int, folder: Path) -> dict[str, list[float]]:
    """What a server that loads the folder finds in it."""
    with shown_as_folder(file, folder) as seen:
        (path,) = seen.iterdir()
        return {name: tensor.tolist() for name, tensor in load_file(path).items()}


def test_a_version_that_the_trainer_deletes_meanwhile_is_read_to_its_end(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "published").write(1, [("w", torch.tensor([1.0, 2.0]))])
    file, tensors = VersionReader().read(manifest)
    Path(manifest.place).unlink()
    assert tensors["w"].tolist() == [1.0, 2.0]
    assert shown(file, tmp_path / "shown") == {"w": [1.0, 2.0]}
    assert not (tmp_path / "shown").exists()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)


def test_a_file_exchanged_after_the_check_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(tmp_path / "published").write(1, [("w", torch.tensor([1.0, 2.0]))])
    reader = VersionReader()
    checked_read = reader._reader.read

    def read_then_exchange(*given: Any) -> Any:
        tensors = checked_read(*given)
        save_file({"w": torch.tensor([6.0, 6.0])}, tmp_path / "theirs")
        os.replace(tmp_path / "theirs", manifest.place)
        return tensors

    monkeypatch.setattr(reader._reader, "read", read_then_exchange)
    file, _ = reader.read(manifest)
    assert shown(file, tmp_path / "shown") == {"w": [1.0, 2.0]}


def test_what_a_delta_leads_to_is_shown_whole(tmp_path: Path) -> None:
    publisher, reader = publish(tmp_path / "published"), VersionReader()
    first, second = torch.arange(64.0), torch.arange(64.0)
    second[3] = 9.0
    whole = publisher.write(1, [("w", first), ("b", first)])
    delta = publisher.write(2, [("w", second), ("b", first)])
    assert delta.base_version == 1
    for manifest, values in ((whole, first), (delta, second)):
        file, _ = reader.read(manifest)
        assert shown(file, tmp_path / "shown") == {"w": values.tolist(), "b": first.tolist()}


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "published").write(4, [("w", torch.tensor([1.0]))])
    Path(manifest.place).unlink()
    with pytest.raises(WeightsRefused, match=r"version 4: .*No such file"):
        VersionReader().read(manifest)


def test_another_models_version_is_refused_by_name(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "published").write(4, [("w", torch.tensor([1.0]))])
    weights = SGLangWeights(small_config(engine="sglang"), str(tmp_path), Ranks((1.0, 1.0), []), set())  # type: ignore[arg-type]
    weights.shapes = {"w": (1,), "v": (1,)}
    with pytest.raises(WeightsRefused, match="tensor 'v' is missing"):
        weights._read(manifest)
