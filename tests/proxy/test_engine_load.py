"""Reading a replica's own metrics page for what it runs and queues."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.replica import SimulatedReplica
from proxy.engine_load import EngineLoad, read

PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 1e+01
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 500.0
"""


def test_engines_of_one_server_are_summed():
    assert read(PAGE) == EngineLoad(running=7.0, waiting=11.0)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>502</html>",
        b"vllm:num_requests_running 1.0\n",
        PAGE.replace(b"} 4.0", b"} 4.0.0"),
        b"x vllm:num_requests_running 1\ny vllm:num_requests_waiting 1\n",
    ],
    ids=["empty", "html", "half", "not a number", "other names"],
)
def test_other_pages_tell_nothing(page):
    assert read(page) is None


async def test_page_of_a_replica_is_read():
    async with (
        SimulatedReplica() as replica,
        httpx.AsyncClient(base_url=replica.url, trust_env=False) as client,
    ):
        page = await client.get("/metrics")
    assert read(page.content) == EngineLoad(running=0.0, waiting=0.0)
