"""The service on a Ray cluster that was there before it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
from ray.cluster_utils import Cluster
from support.service import Service, twinspark


def test_joining_a_running_cluster_leaves_it_running(tmp_path: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20})
    try:
        service = Service(tmp_path, "--demo", "--port", "0", "--ray-address", cluster.address)
        try:
            service.until_ready()
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert service.run("stop").returncode == 0
            assert service.process.wait(30) == 0
        finally:
            service.end()
        running = [process for node in cluster.list_all_nodes() for process in processes(node)]
        assert len(running) >= 2
        assert all(process.poll() is None for process in running)
    finally:
        cluster.shutdown()


def processes(node: object) -> list[subprocess.Popen[bytes]]:
    started = node.all_processes  # type: ignore[attr-defined]
    return [info.process for kind in ("raylet", "gcs_server") for info in started.get(kind, [])]


def test_a_cluster_that_is_not_there_is_an_error_with_its_address(tmp_path: Path) -> None:
    refused = twinspark(
        "serve", "--demo", "--port", "0", "--ray-address", "127.0.0.1:1", "--state", str(tmp_path / "state")
    )
    assert refused.returncode == 1
    assert "127.0.0.1:1" in refused.stderr
    assert "Traceback" not in refused.stderr
