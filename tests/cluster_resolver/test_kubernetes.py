"""KubernetesClusterResolver with the official client and a small server in the place of the Kubernetes API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import pytest

from tfstyle_dist.cluster_resolver import KubernetesClusterResolver, KubernetesExecutableLocation

OFF_CLUSTER = KubernetesExecutableLocation.OFF_CLUSTER


class Api(BaseHTTPRequestHandler):
    """Answers ``GET /api/v1/pods?labelSelector=...`` from ``pods``."""

    pods: ClassVar[dict[str, list[tuple[str, str, str]]]] = {}

    def do_GET(self) -> None:
        url = urlparse(self.path)
        assert url.path == "/api/v1/pods"
        found = self.pods.get(parse_qs(url.query)["labelSelector"][0], [])
        items = [
            {"metadata": {"name": name}, "status": {"phase": phase, "podIP": address, "hostIP": "9.9.9.9"}}
            for name, phase, address in found
        ]
        body = json.dumps({"apiVersion": "v1", "kind": "PodList", "items": items}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    """A Kubernetes API that a kubeconfig file names."""
    pytest.importorskip("kubernetes")
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "me", "user": {}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        from kubernetes.config import kube_config

        # The client reads KUBECONFIG when it is imported.
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
        yield Api
        server.shutdown()
        thread.join()


def test_pods_become_tasks_by_name(cluster: type[Api]) -> None:
    cluster.pods = {
        "job-name=a": [("a-1", "Running", "10.0.0.2"), ("a-0", "Running", "10.0.0.1")],
        "job-name=b": [("b-0", "Running", "10.0.0.3")],
    }
    resolver = KubernetesClusterResolver(
        {"worker": ["job-name=a", "job-name=b"]}, tf_server_port=7000, executable_location=OFF_CLUSTER
    )
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"]}
    assert resolver.master() == ""
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "grpc://10.0.0.3:7000"


def test_the_pods_of_an_indexed_job_are_numbered_by_their_index(cluster: type[Api]) -> None:
    names = [f"train-{index}-x{9 - index % 10}k" for index in range(12)]
    cluster.pods = {
        "job-name=train": [(name, "Running", f"10.0.0.{index}") for index, name in sorted(enumerate(names), key=str)]
    }
    resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, executable_location=OFF_CLUSTER)
    assert resolver.cluster_spec().as_dict() == {"worker": [f"10.0.0.{index}:8470" for index in range(12)]}


def test_a_selector_without_pods_is_named(cluster: type[Api], caplog: pytest.LogCaptureFixture) -> None:
    cluster.pods = {}
    resolver = KubernetesClusterResolver({"worker": ["job-name=nobody"]}, executable_location=OFF_CLUSTER)
    assert resolver.cluster_spec().job_tasks("worker") == []
    (said,) = caplog.messages
    assert "no pods with the labels 'job-name=nobody'" in said


def test_a_selector_that_is_in_no_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'worker' must be a list.*'job-name=a'.*write \{'worker': \['job-name=a'\]\}"):
        KubernetesClusterResolver({"worker": "job-name=a"})


def test_a_pod_that_does_not_run_is_named(cluster: type[Api]) -> None:
    cluster.pods = {"job-name=tensorflow": [("t-0", "Pending", "")]}
    resolver = KubernetesClusterResolver(executable_location=OFF_CLUSTER)
    with pytest.raises(RuntimeError, match=r"Pod 't-0' is not running; phase: 'Pending'"):
        resolver.cluster_spec()


def test_a_wrong_location_is_refused() -> None:
    with pytest.raises(ValueError, match=r"WITHIN_CLUSTER or OFF_CLUSTER, got 'off'"):
        KubernetesClusterResolver(executable_location="off")  # type: ignore[arg-type]
