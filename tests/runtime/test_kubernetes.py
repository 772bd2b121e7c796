"""Discovery in Kubernetes: what a worker and a frontend ask of its API. A cluster is not at hand here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from harness.kubernetes import kubernetes
from harness.stack import COMMAND, Stack, stack
from harness.waiting import until

METADATA = "/apis/nvidia.com/v1alpha1/namespaces/ns/dynamoworkermetadatas"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


def test_worker_registers_under_its_pod_and_watches_the_others(model: Path, tmp_path: Path) -> None:
    with kubernetes(tmp_path) as api, stack(tmp_path, **api.env("worker-0")) as made:
        worker = made.start_worker("--model", str(model), "--served-model-name", "tiny", "--engine", "fake")
        until("a ready worker", worker.is_ready, 30)
        mine = f"{METADATA}/worker-0"
        until("its endpoint and its model", lambda: "tiny" in json.dumps(api.written.get(mine)), 30)
        (owner,) = api.written[mine]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "worker-0", "uid-of-worker-0")
        assert "dynamo/backend/generate" in json.dumps(api.written[mine]["spec"]["data"])
        wanted = {f"{verb} {path}" for verb in ("list", "watch") for path in (METADATA, SLICES)}
        until("its watches", lambda: api.asked == wanted, 10)


def test_process_outside_a_pod_is_told_what_is_missing(model: Path, tmp_path: Path) -> None:
    words = ["worker", "--model", str(model), "--engine", "fake", "--discovery-backend", "kubernetes"]
    done = subprocess.run(
        [*COMMAND, *words], env=Stack(tmp_path).environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "with POD_NAME, POD_NAMESPACE and POD_UID" in done.stderr
    assert "Traceback" not in done.stderr
