"""Metrics of `penstock serve` as Prometheus reads them, and its line on the terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from served import Served, serving
from service_parts import Client, forward_body

pytestmark = [pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(900)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as opened:
        yield opened


async def test_each_process_exports_what_it_did(served: Served) -> None:
    run = served.folder / "service"
    async with aiohttp.ClientSession() as http:
        client = Client(http, served.environment["TINKER_BASE_URL"], served.environment["TINKER_API_KEY"])
        await until_it_answers(client)
        model = await client.model()
        assert (await client.result(await client.forward(model, 1))).metrics["loss:sum"] > 0
        await client.result(await client.step(model, 2))
        assert (await client.result(await client.forward(model, 3, ids=[1, 2, 10**6])))["category"] == "user"
        assert (await client.send_forward(forward_body(model, 4, loss="stable_reinforce")))[0] == 422
        await sample(client, model)
        stranger = Client(http, served.environment["TINKER_BASE_URL"], "tml-unknown-0123456789abcdef")
        assert (await stranger.call("GET", "training_runs"))[0] == 401

        token = (run / "metrics.token").read_text().strip()
        expected = {
            "trainer": [
                'penstock_service_wait_seconds_count{kind="forward",owner="owner"} 2.0',
                'penstock_service_request_seconds_count{kind="optim_step"} 1.0',
                'penstock_service_requests_total{kind="forward",outcome="done",owner="owner"} 1.0',
                'penstock_service_requests_total{kind="forward",outcome="user",owner="owner"} 1.0',
                'penstock_service_tokens_total{owner="owner",use="trained"} 5.0',
                'penstock_service_wait_seconds_count{kind="sample",owner="owner"} 1.0',
                'penstock_service_requests_total{kind="sample",outcome="done",owner="owner"} 1.0',
                'penstock_service_samples_total{owner="owner"} 2.0',
                'penstock_service_tokens_total{owner="owner",use="prompt"} 3.0',
                'penstock_service_tokens_total{owner="owner",use="sampled"} 8.0',
                "penstock_service_adapters 1.0",
            ],
            "api": ['penstock_api_refusals_total{cause="key"} 1.0', 'penstock_api_refusals_total{cause="request"} 1.0'],
            "head": [
                'penstock_service_waiting_requests{owner="owner"} 0.0',
                'penstock_service_done_requests_total{owner="owner"} 5.0',
                'penstock_run_role_up{process="trainer",run="service"} 1.0',
            ],
        }
        async with asyncio.timeout(300):
            for name, lines in expected.items():
                while missing := [line for line in lines if line not in await scraped(http, run, name, token)]:
                    await asyncio.sleep(0.2)
                    print(name, missing)
            while "owner: 5 requests done, 0 wait" not in (served.folder / "serve.log").read_text():
                await asyncio.sleep(0.2)


async def sample(client: Client, model: str) -> None:
    """Two sequences of four tokens from the base model."""
    session = model.partition(":")[0]
    opened = await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0)
    prompt, params = {"chunks": [{"tokens": [1, 2, 3]}]}, {"max_tokens": 4, "stop": []}
    body = {"prompt": prompt, "sampling_params": params, "num_samples": 2, "seq_id": 1}
    future = await client.post("asample", **body, sampling_session_id=opened["sampling_session_id"])
    status, answer = 408, None
    async with asyncio.timeout(300):
        while status == 408:
            status, answer = await client.call("POST", "retrieve_future", {"request_id": future["request_id"]})
    assert (status, type(answer)) == (200, bytes), answer


async def until_it_answers(client: Client) -> None:
    async with asyncio.timeout(300):
        while True:
            try:
                await client.call("GET", "healthz")
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
            else:
                return


async def scraped(http: aiohttp.ClientSession, run: Path, name: str, token: str) -> str:
    """The metrics of the process of that name, which Prometheus finds in the run's file; empty where it is not there
    yet."""
    file = run / "prometheus-targets.json"
    targets = json.loads(file.read_text()) if file.exists() else []
    for address in (one["targets"][0] for one in targets if one["labels"]["name"] == name):
        async with http.get(f"http://{address}/metrics", headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 200
            return await answer.text()
    return ""
