"""Exported objects and the real runtime: discovery by Kubernetes, with the rights of the exported role."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from dynamo_vllm.config.options import ExportOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.export import k8s, workload
from dynamo_vllm.export.settings import Settings
from harness import commands
from harness.kube_api import RECORDS, Cluster, Document, Pod, cluster
from harness.processes import COMMAND, free_port, kill_tree
from harness.stack import Stack, environment
from harness.waiting import until
from runtime.conftest import fake

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(240)  # four processes start, one after the other where cores are few
MODEL = "/models/tiny"
NAMESPACE = "models"


class Kubelet:
    """Starts pods of exported workloads as processes here."""

    def __init__(self, folder: Path, model: Path, api: Cluster, kubeconfig: Path) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._env: dict[str, dict[str, str]] = {}
        self._folder, self._model, self._api, self._kubeconfig = folder, model, api, kubeconfig

    def start(self, documents: list[Document], name: str, port: int) -> subprocess.Popen[bytes]:
        (service,) = [d for d in documents if d["kind"] == "Service"]
        (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
        template = deployment["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        fields = {"POD_NAME": name, "POD_NAMESPACE": NAMESPACE, "POD_UID": f"uid-{name}"}
        env = {item["name"]: item.get("value", fields.get(item["name"], "")) for item in container["env"]}
        # One machine stands for several: ports and addresses are not its pods' own.
        is_worker = container["args"][0] == "worker"
        env["DYN_SYSTEM_PORT" if is_worker else "DYN_HTTP_PORT"] = str(port)
        env |= {"KUBECONFIG": str(self._kubeconfig), "HOME": str(self._folder)}
        if not is_worker:
            env["DYN_HTTP_HOST"] = "127.0.0.1"
        argv = [word.replace(MODEL, str(self._model)) for word in container["args"]]
        whole = environment(self._folder, **env)
        del whole["DYN_FILE_KV"]
        self._env[name] = whole
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([*COMMAND, *argv], env=whole, stdout=log, stderr=log)
        self.running[name] = process
        path = container["readinessProbe"]["httpGet"]["path"]
        self._api.pods.append(Pod(name, f"uid-{name}", f"http://127.0.0.1:{port}{path}", service))
        return process

    def inside(self, pod: str, *argv: str) -> str:
        """What a command says in a pod's environment, as `kubectl exec` runs it."""
        return commands.output(self._env[pod], *argv)

    def log(self, pod: str) -> str:
        return (self._folder / f"{pod}.log").read_text()


@pytest.fixture
def exported() -> dict[str, list[Document]]:
    engine = {"engine": "fake", "fake_engine": json.dumps({"vocab_size": 1000})}
    group = WorkerGroup(2, {**engine, "served_model_name": ("tiny",), "drain_seconds": 5})
    found = workload.of_cluster(Topology(model=MODEL, workers=(group,)), "kubernetes")
    settings = Settings(ExportOptions(config="serve.yaml", output="out", name="chat", device="cpu"))
    return k8s.files(found, settings)


@pytest.fixture
def kubelet(tmp_path: Path, model: Path, exported: dict[str, list[Document]]) -> Iterator[Kubelet]:
    (role,) = [document for document in exported["access.yaml"] if document["kind"] == "Role"]
    with cluster(tmp_path, NAMESPACE, role["rules"]) as (api, kubeconfig):
        made = Kubelet(tmp_path, model, api, kubeconfig)
        try:
            yield made
        finally:
            for process in made.running.values():
                kill_tree(process.pid)
                process.wait(60)


def models(url: str) -> list[str]:
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"{url}/v1/models", timeout=30)
        return [model["id"] for model in answer.json()["data"]] if answer.status_code == 200 else []
    return []


def instances(url: str) -> set[int]:
    """Workers that the frontend sends requests to."""
    answer = httpx.get(f"{url}/instances", timeout=30)
    found = answer.json()["instances"] if answer.status_code == 200 else []
    return {one["instance_id"] for one in found if one["endpoint"] == "generate"}


def endpoints(api: Cluster, pod: str) -> Any:
    record = api.objects.get(RECORDS, {}).get(pod)
    return record["spec"]["data"]["endpoints"] if record else {}


def test_pods_find_each_other_with_the_exported_role(
    kubelet: Kubelet, exported: dict[str, list[Document]]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    api = kubelet._api
    kubelet.start(exported["frontend.yaml"], "chat-frontend-a", port)
    first = kubelet.start(exported["worker.yaml"], "chat-worker-a", free_port())
    until("the model in the list", lambda: "tiny" in models(url), 90)
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    until("the frontend's readiness", lambda: next(p for p in api.pods if "frontend" in p.name).is_ready)

    shown = kubelet.inside("chat-frontend-a", "status", url, "--json")
    assert [worker["state"] for worker in json.loads(shown)["workers"]] == ["ready"]

    second = kubelet.start(exported["worker.yaml"], "chat-worker-b", free_port())
    until("the second worker's readiness", lambda: api.pods[-1].is_ready, 90)
    until("both workers in use", lambda: len(instances(url)) == 2)
    first.send_signal(signal.SIGTERM)  # what the kubelet sends behind preStop
    assert first.wait(60) == 0
    assert not [name for name in endpoints(api, "chat-worker-a") if "generate" in name]
    until("one worker in use", lambda: len(instances(url)) == 1)
    for _ in range(3):
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200

    second.kill()  # its record stays, and its pod is not ready any more
    until("an empty list", lambda: not models(url), 60)
    assert endpoints(api, "chat-worker-b")
    assert api.refused == []
    assert "503 Service Unavailable" not in kubelet.log("chat-worker-a")  # probes while it started
    used = {verb for resource, verb in api.asked if resource == "dynamoworkermetadatas"}
    assert used == {"list", "watch", "patch"}


def test_process_outside_a_pod_is_told_what_is_missing(model: Path, tmp_path: Path) -> None:
    words = ("worker", *fake(model), "--discovery-backend", "kubernetes")
    done = commands.run(Stack(tmp_path).environment(), *words)
    assert done.returncode == 1
    assert "with POD_NAME, POD_NAMESPACE and POD_UID" in done.stderr
    assert "Traceback" not in done.stderr
