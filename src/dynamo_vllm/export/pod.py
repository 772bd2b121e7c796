"""Describes one container and its pod, shared by plain objects and the operator's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.export.settings import USER
from dynamo_vllm.export.workload import LEADER, MODELS, PRE_STOP_SECONDS, SHARED
from dynamo_vllm.supervise.limits import SupervisorLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.export.settings import Document, Settings
    from dynamo_vllm.export.workload import Workload

COMMAND = "dynamo-vllm"
_LIMITS = SupervisorLimits()
_LIVENESS_SECONDS, _READINESS_SECONDS, _STARTUP_SECONDS = 10, 2, 10
LOCKED_DOWN: Document = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
KV_DISK = "kv-disk"
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


def container(workload: Workload, settings: Settings, env: Sequence[Document], name: str) -> Document:
    return {
        "name": name,
        "image": settings.image,
        "command": [COMMAND],
        "args": [escaped(word) for word in workload.args],
        "env": [*env, *own_env(workload, settings)],
        "ports": [{"name": port_name(workload), "containerPort": workload.port}],
        "resources": settings.resources(workload),
        **probes(workload, settings),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in _mounts(workload)],
    }


def own_env(workload: Workload, settings: Settings) -> list[Document]:
    """Return the variables: caches in writable folders, tokens from secrets, then those of the file."""
    found: list[Document] = [variable("HOME", "/tmp"), variable("HF_HOME", f"{MODELS}/huggingface")]
    found.append(from_secret("HF_TOKEN", settings.options.hf_secret, optional=True))
    found += [from_secret(name, settings.secret, optional=False) for name in workload.secrets]
    return [*found, *(variable(name, escaped(value)) for name, value in workload.env.items())]


def discovery(settings: Settings) -> list[Document]:
    """Return the variables of discovery. A separate namespace keeps two deployments apart."""
    found = [variable("DYN_NAMESPACE", settings.name)]
    if settings.discovery != "kubernetes":
        etcd = variable("ETCD_ENDPOINTS", str(settings.options.etcd))
        return [*found, variable("DYN_DISCOVERY_BACKEND", "etcd"), etcd]
    return [
        *found,
        variable("DYN_DISCOVERY_BACKEND", "kubernetes"),
        from_field("POD_NAME", "metadata.name"),
        from_field("POD_NAMESPACE", "metadata.namespace"),
        from_field("POD_UID", "metadata.uid"),
    ]


def planes(settings: Settings) -> list[Document]:
    found = [
        variable("DYN_REQUEST_PLANE", settings.request_plane),
        variable("DYN_EVENT_PLANE", "nats" if settings.options.nats else settings.event_plane),
    ]
    return [*found, variable("NATS_SERVER", settings.options.nats)] if settings.options.nats else found


def variable(name: str, value: str) -> Document:
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def from_secret(name: str, secret: str, *, optional: bool) -> Document:
    ref: Document = {"name": secret, "key": name}
    return {"name": name, "valueFrom": {"secretKeyRef": {**ref, "optional": True} if optional else ref}}


def port_name(workload: Workload) -> str:
    return "system" if workload.is_worker else "http"


def probes(workload: Workload, settings: Settings) -> Document:
    """/live of a worker returns 503 while it starts and while its engine hangs, 200 while it sleeps.

    The limits are those of `serve`. /health of a frontend says whether a model can answer.
    """
    seconds = settings.options.start_seconds if workload.is_worker else _LIMITS.first_answer_seconds
    return {
        "startupProbe": _probe("/live", workload, _STARTUP_SECONDS, seconds),
        "livenessProbe": _probe("/live", workload, _LIVENESS_SECONDS, _LIMITS.unwell_seconds),
        "readinessProbe": _probe("/health", workload, _READINESS_SECONDS, 3 * _READINESS_SECONDS),
    }


def live_probes(port: str) -> Document:
    """Return the probes of a process that says on one path whether it works."""
    return {
        "startupProbe": _probe_at(port, "/live", _READINESS_SECONDS, _LIMITS.first_answer_seconds),
        "livenessProbe": _probe_at(port, "/live", _LIVENESS_SECONDS, _LIMITS.unwell_seconds),
        "readinessProbe": _probe_at(port, "/live", _READINESS_SECONDS, 3 * _READINESS_SECONDS),
    }


def _probe(path: str, workload: Workload, period: int, seconds: float) -> Document:
    scheme = {"scheme": "HTTPS"} if workload.has_tls else {}  # Kubernetes checks no certificate
    return _probe_at(port_name(workload), path, period, seconds, **scheme)


def _probe_at(port: str, path: str, period: int, seconds: float, **scheme: str) -> Document:
    return {
        "httpGet": {"path": path, "port": port, **scheme},
        "periodSeconds": period,
        "timeoutSeconds": round(_LIMITS.answer_seconds),
        "failureThreshold": max(1, -(-round(seconds) // period)),
    }


def spec(workload: Workload, settings: Settings, main: Document, *, shm: bool = True) -> Document:
    return {
        **base(workload.grace_seconds),
        "containers": [main],
        "volumes": _volumes(workload, settings, shm),
    }


def base(grace_seconds: int) -> Document:
    """Return what every pod has."""
    return {
        "terminationGracePeriodSeconds": grace_seconds,
        # For a Service called vllm, Kubernetes would set VLLM_PORT=tcp://…, with which vLLM fails.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _mounts(workload: Workload) -> list[tuple[str, str]]:
    """Return the mounts. The frontend has the models too: it reads their tokenizers, or downloads them."""
    mounts = [("scratch", "/tmp"), ("models", MODELS)]
    if workload.is_worker:
        mounts.append(("shm", "/dev/shm"))
    if workload.disk is not None:
        mounts.append((KV_DISK, workload.disk.path))
    return [*mounts, ("shared", SHARED)] if uses_shared(workload) else mounts


def uses_shared(workload: Workload) -> bool:
    return any(SHARED in word for word in workload.args)


def _volumes(workload: Workload, settings: Settings, shm: bool) -> list[Document]:
    found: list[Document] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "models", "persistentVolumeClaim": {"claimName": settings.claim}},
    ]
    if workload.is_worker and shm:
        size = f"{settings.shm_gib(workload)}Gi"
        found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if workload.disk is not None:
        # On the node's disk: it outlives the container, and goes with the pod.
        found.append({"name": KV_DISK, "emptyDir": {"sizeLimit": f"{workload.disk.gib}Gi"}})
    if uses_shared(workload):
        claim = {"persistentVolumeClaim": {"claimName": settings.full_name("embeddings")}}
        found.append({"name": "shared", **(claim if workload.shares_embeddings else {"emptyDir": {}})})
    return found


def escaped(word: str) -> str:
    """Escape $(NAME) in the user's words, because Kubernetes would substitute it."""
    if word == "$(NODE_RANK)" or LEADER in word or word.endswith(".svc.cluster.local"):
        return word
    return word.replace("$(", "$$(")
