"""Writes one DynamoGraphDeployment (nvidia.com/v1beta1) for the Dynamo operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.export import k8s, pod
from dynamo_vllm.export.settings import RUNTIME

if TYPE_CHECKING:
    from dynamo_vllm.export.k8s import Files
    from dynamo_vllm.export.settings import Document, Settings
    from dynamo_vllm.export.workload import Workload, Workloads

FILE = "graph.yaml"
KIND = "DynamoGraphDeployment"
MAX_COMPONENTS = 25
HTTP_PORT = 8000
"""The port to which the operator's Service of a frontend leads."""


def files(found: Workloads, settings: Settings) -> Files:
    made: Files = {}
    if settings.options.kube_namespace:
        made["access.yaml"] = k8s.access(settings)[:1]
    if claims := k8s.storage(found, settings):
        made["storage.yaml"] = claims
    made[FILE] = [graph(found, settings)]
    made[k8s.KUSTOMIZATION] = [k8s.kustomization(made)]
    return made


def graph(found: Workloads, settings: Settings) -> Document:
    _refuse(found)
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": KIND,
        "metadata": settings.metadata(settings.name),
        "spec": {
            "backendFramework": "vllm",
            "components": [component(workload, settings) for workload in found.all],
        },
    }


def _refuse(found: Workloads) -> None:
    if found.gateway is not None:
        raise ConfigError(
            "the operator names its frontends' Services itself, so no gateway is written for them; leave "
            "--operator out, or add --no-gateway"
        )
    for workload in found.workers:
        if workload.nodes > 1:
            raise ConfigError(
                f"{workload.name} spans {workload.nodes} nodes: the operator would add flags of its own "
                "launcher to ours; leave --operator out for it"
            )
    if found.frontend.port != HTTP_PORT:
        raise ConfigError(
            f"frontend: port {found.frontend.port}: the operator's Service leads to {HTTP_PORT}; leave it out"
        )
    if len(found.all) > MAX_COMPONENTS:
        raise ConfigError(f"{len(found.all)} groups are more than the operator accepts ({MAX_COMPONENTS})")


def _type(workload: Workload) -> str:
    """Return the operator's type: it knows frontends, prefill and decode workers, and workers."""
    if workload.role is None:
        return "frontend"
    card = CARDS[workload.role]
    return card.process_name if card.hands_over_kv else "worker"


def component(workload: Workload, settings: Settings) -> Document:
    """Return the component; the operator sets namespace, discovery and identity of the container `main`."""
    env = [*pod.planes(settings), *k8s.reach(workload)]
    main = pod.container(workload, settings, env, "main")
    found: Document = {
        "name": workload.name,
        "type": _type(workload),
        "runtimeVersionOverride": RUNTIME,
        "replicas": workload.count if workload.is_worker else settings.options.frontends,
    }
    if workload.is_worker:
        # The operator mounts this at /dev/shm.
        found["sharedMemorySize"] = f"{settings.shm_gib(workload)}Gi"
        main["volumeMounts"] = [mount for mount in main["volumeMounts"] if mount["name"] != "shm"]
    return {**found, "podTemplate": {"spec": pod.spec(workload, settings, main, shm=False)}}
