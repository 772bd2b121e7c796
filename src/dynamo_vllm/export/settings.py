"""Resolves the settings of an export that are not part of the topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm import __version__

if TYPE_CHECKING:
    from dynamo_vllm.config.options import ExportOptions
    from dynamo_vllm.export.workload import Workload

Document = dict[str, Any]

RUNTIME = "1.6.1"
"""The version of ai-dynamo-runtime, for the operator: it cannot derive it from our images' versions."""
GROUP = "nvidia.com"
DISCOVERY_LABELS = {
    f"{GROUP}/dynamo-discovery-backend": "kubernetes",
    f"{GROUP}/dynamo-discovery-enabled": "true",
}
"""Labels of a Service. Kubernetes copies them to its EndpointSlices, which the runtime reads."""
USER = 10001
"""The user id of containers, which the Dockerfile creates."""
_CPUS, _MEMORY_GB = 4, 32


@dataclass(frozen=True, slots=True)
class Settings:
    """The options with their defaults, and the names that all objects share."""

    options: ExportOptions
    request_plane: str = "tcp"
    event_plane: str = "zmq"

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def image(self) -> str:
        return self.options.image or f"dynamo-vllm:{__version__}-{self.options.device}"

    @property
    def on_gpu(self) -> bool:
        return self.options.device == "cuda"

    @property
    def discovery(self) -> str:
        return self.options.discovery or "kubernetes"

    @property
    def claim(self) -> str:
        return self.options.cache_claim or f"{self.name}-models"

    @property
    def secret(self) -> str:
        return f"{self.name}-secrets"

    def full_name(self, part: str) -> str:
        return f"{self.name}-{part}"

    def labels(self, part: str | None = None) -> dict[str, str]:
        found = {"app.kubernetes.io/name": "dynamo-vllm", "app.kubernetes.io/instance": self.name}
        return found if part is None else {**found, "app.kubernetes.io/component": part}

    def metadata(self, name: str, part: str | None = None, **more: Any) -> Document:
        found: Document = {"name": name}
        if self.options.kube_namespace:
            found["namespace"] = self.options.kube_namespace
        return {**found, "labels": self.labels(part), **more}

    def discovered(self, name: str, part: str) -> Document:
        """Return the metadata of a Service that tells the runtime which pods are ready."""
        found = self.metadata(name, part)
        if self.discovery == "kubernetes":
            found["labels"] = {**found["labels"], **DISCOVERY_LABELS}
        return found

    def disruption_budget(self, part: str) -> Document:
        """Return a budget by which nodes can be drained one pod at a time.

        A budget of none would block the node of a single worker forever.
        """
        return {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": self.metadata(self.full_name(part), part),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": self.labels(part)}},
        }

    def gpus(self, workload: Workload) -> int:
        return workload.gpus if self.on_gpu else 0

    def resources(self, workload: Workload) -> Document:
        """Return the resources of a worker, without a CPU limit: throttling would delay all its requests."""
        if not workload.is_worker:
            return {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
        times = max(1, self.gpus(workload))
        cores = self.options.worker_cpus or _CPUS * times
        memory = (self.options.worker_memory_gb or _MEMORY_GB * times) + workload.tier_gib
        limits = {"memory": f"{memory}Gi"}
        if self.gpus(workload):
            limits["nvidia.com/gpu"] = str(self.gpus(workload))
        disk = {} if workload.disk is None else {"ephemeral-storage": f"{workload.disk.gib}Gi"}
        return {"requests": {"cpu": str(cores), **limits, **disk}, "limits": limits}

    def shm_gib(self, workload: Workload) -> int:
        """Return the shared memory of a worker, which counts as its memory."""
        return self.options.shm_gb + workload.tier_gib
