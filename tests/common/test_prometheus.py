from __future__ import annotations

from prometheus_client.registry import Collector

from penstock.common.prometheus import Metrics, counter_family, exposition, gauge_family, metrics_token


def test_metrics_have_prefix_and_registry() -> None:
    first, second = Metrics("agent"), Metrics("agent", process=False)
    first.counter("episodes", "E", ["outcome"]).labels("done").inc(2)
    first.gauge("limit", "L").set(3)
    first.histogram("seconds", "S", ["tool"], buckets=(1.0, 2.0)).labels("python").observe(1.5)
    text = first.text().decode()
    for line in (
        'penstock_agent_episodes_total{outcome="done"} 2.0',
        "penstock_agent_limit 3.0",
        'penstock_agent_seconds_bucket{le="1.0",tool="python"} 0.0',
        'penstock_agent_seconds_bucket{le="2.0",tool="python"} 1.0',
    ):
        assert line in text
    assert "penstock_process_cpu_seconds_total" in text
    assert second.text() == b""


def test_families_of_a_collector() -> None:
    class Both(Collector):
        def collect(self):
            yield gauge_family("penstock_groups", "G", ["state"], {"open": 1, "done": 2})
            yield counter_family("penstock_waited", "W", ["run", "waiter"], [(("r", "agent"), 4)])

    text = exposition(Both()).decode()
    assert 'penstock_groups{state="open"} 1.0\npenstock_groups{state="done"} 2.0' in text
    assert 'penstock_waited_total{run="r",waiter="agent"} 4.0' in text


def test_metrics_token_is_stable_and_one_way() -> None:
    assert metrics_token("run") == metrics_token("run") != metrics_token("other")
    assert "run" not in metrics_token("run")
