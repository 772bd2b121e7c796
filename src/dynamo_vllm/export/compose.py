"""Writes a compose file: everything on one machine in containers, with etcd and NATS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.export import gateway as gateways
from dynamo_vllm.export.pod import COMMAND
from dynamo_vllm.export.settings import USER
from dynamo_vllm.export.workload import KV, MODELS, SHARED, SYSTEM_PORT, grace_seconds

if TYPE_CHECKING:
    from dynamo_vllm.config import topology
    from dynamo_vllm.export.gateway import Gateway
    from dynamo_vllm.export.settings import Document, Settings
    from dynamo_vllm.export.workload import Disk, Workload, Workloads

FILE = "compose.yaml"
ETCD_IMAGE = "quay.io/coreos/etcd:v3.6.1"
NATS_IMAGE = "nats:2.11.4-alpine"
_ETCD, _NATS = "http://etcd:2379", "nats://nats:4222"
_LOOPBACK = "127.0.0.1"
_PUBLIC = ("0.0.0.0", "::")
_PULSE = {"interval": "5s", "timeout": "5s", "retries": 24}
_HARDENED: Document = {
    "restart": "unless-stopped",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "read_only": True,
}


def document(found: Workloads, settings: Settings) -> Document:
    services = {"etcd": etcd(), "nats": nats()}
    services |= {workload.name: service(workload, found, settings) for workload in found.all}
    volumes: Document = {"models": {}, "etcd": {}}
    if any(_uses_shared(workload) for workload in found.workers):
        volumes["shared"] = {}
    volumes |= {_kv_volume(one, one.disk): {} for one in found.workers if one.disk is not None}
    if found.gateway is not None:
        services |= gateway_services(found.gateway, found, settings)
        # In memory, and for the user of the containers alone.
        in_memory = {"type": "tmpfs", "device": "tmpfs", "o": f"uid={USER},gid={USER},mode=0700"}
        volumes |= {"gateway-sockets": {"driver_opts": in_memory}, "gateway-data": {}, "usage": {}}
    return {"name": settings.name, "services": services, "volumes": volumes}


def etcd() -> Document:
    """Return the service of etcd. Its data matters only while workers run; the volume is for its restart."""
    return {
        "image": ETCD_IMAGE,
        "command": [
            "/usr/local/bin/etcd",
            "--data-dir=/etcd-data",
            "--listen-client-urls=http://0.0.0.0:2379",
            f"--advertise-client-urls={_ETCD}",
        ],
        "healthcheck": {"test": ["CMD", "/usr/local/bin/etcdctl", "endpoint", "health"], **_PULSE},
        "volumes": ["etcd:/etcd-data"],
        **_HARDENED,
    }


def nats() -> Document:
    test = ["CMD", "wget", "-q", "-O", "/dev/null", f"http://{_LOOPBACK}:8222/healthz"]
    return {
        "image": NATS_IMAGE,
        "command": ["--http_port", "8222"],
        "healthcheck": {"test": test, **_PULSE},
        **_HARDENED,
    }


def service(workload: Workload, found: Workloads, settings: Settings) -> Document:
    made: Document = {
        "image": settings.image,
        "entrypoint": [COMMAND],
        "command": [_escaped(word) for word in workload.args],
        "environment": environment(workload, settings),
        "depends_on": _healthy("etcd", "nats"),
        "healthcheck": healthcheck(workload, settings),
        "stop_grace_period": f"{workload.grace_seconds}s",
        "init": True,
        "user": f"{USER}:{USER}",
        # Compiled kernels are loaded from this folder.
        "tmpfs": ["/tmp:exec,mode=1777"],
        "volumes": [f"models:{MODELS}"],
        **_HARDENED,
    }
    if not workload.is_worker:
        if found.gateway is None:
            made["ports"] = _published(found.host, workload.port)
        return made
    if _uses_shared(workload):
        made["volumes"].append(f"shared:{SHARED}")
    if found.gateway is not None:
        # /tmp is empty after a restart.
        made["volumes"].append(f"usage:{gateways.USAGE}")
        made["environment"] = {"DYN_VLLM_USAGE_DIR": gateways.USAGE, **made["environment"]}
    if workload.disk is not None:
        made["volumes"].append(f"{_kv_volume(workload, workload.disk)}:{workload.disk.path}")
    made["shm_size"] = f"{settings.shm_gib(workload)}gb"
    if workload.gpu_ids:
        device = {"driver": "nvidia", "device_ids": list(workload.gpu_ids), "capabilities": ["gpu"]}
        made["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return made


def gateway_services(gateway: Gateway, found: Workloads, settings: Settings) -> dict[str, Document]:
    """Return the control app and Envoy. Envoy starts after the control app, and stops before it."""

    def part(name: str, more: topology.Values, env: Document, volumes: list[str]) -> Document:
        url = f"http://{_LOOPBACK}:{gateways.STATUS_PORTS[name]}/live"
        ask = f"import urllib.request as r; r.urlopen('{url}', timeout=4)"
        return {
            "image": settings.image,
            "entrypoint": [COMMAND],
            "command": [_escaped(word) for word in gateway.args(name, found.frontend.name, more)],
            "environment": {**env, "HOME": "/tmp"},
            "healthcheck": {"test": ["CMD", "python", "-c", ask], **_PULSE, "start_period": "60s"},
            "stop_grace_period": f"{grace_seconds(gateway.drain_seconds)}s",
            "init": True,
            "user": f"{USER}:{USER}",
            "tmpfs": ["/tmp:exec,mode=1777"],
            "volumes": [f"gateway-sockets:{gateways.SOCKETS}", *volumes],
            **_HARDENED,
        }

    secrets = {name: f"${{{name}:?put it into .env}}" for name in gateway.secrets}
    known = {gateways.KEY: f"${{{gateways.KEY}:-}}", gateways.DATABASE: gateways.SQLITE, **secrets}
    data = [f"gateway-data:{gateways.DATA}"]
    control = part(gateways.CONTROL, {}, {**discovery(settings), **known}, data)
    certificate = [f"models:{MODELS}:ro"] if gateway.tls else []
    envoy = part(gateways.ENVOY, gateway.tls, {}, certificate)
    return {
        "gateway": {**control, "depends_on": _healthy("etcd", "nats")},
        "envoy": {
            **envoy,
            "depends_on": _healthy("gateway"),
            "ports": _published(found.host, gateway.port),
        },
    }


def notes(found: Workloads) -> list[str]:
    """Return a warning if everybody who reaches the machine may use what runs on it."""
    if found.gateway is not None or found.host not in _PUBLIC:
        return []
    return [f"port {found.frontend.port} is open to other machines without a key; --gateway asks for one"]


def _published(host: str, port: int) -> list[str]:
    return [f"{'' if host in _PUBLIC else f'{_LOOPBACK}:'}{port}:{port}"]


def _healthy(*services: str) -> Document:
    return {name: {"condition": "service_healthy"} for name in services}


def discovery(settings: Settings) -> Document:
    return {
        "DYN_NAMESPACE": settings.name,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": _ETCD,
        "DYN_REQUEST_PLANE": settings.request_plane,
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": _NATS,
    }


def environment(workload: Workload, settings: Settings) -> Document:
    found: Document = {
        **discovery(settings),
        "HOME": "/tmp",
        "HF_HOME": f"{MODELS}/huggingface",
        "HF_TOKEN": "${HF_TOKEN:-}",
    }
    found |= {"DYN_SYSTEM_PORT": str(SYSTEM_PORT)} if workload.is_worker else {"DYN_HTTP_HOST": "0.0.0.0"}
    found |= {name: f"${{{name}:?put it into .env}}" for name in workload.secrets}
    return found | {name: _escaped(value) for name, value in workload.env.items()}


def healthcheck(workload: Workload, settings: Settings) -> Document:
    """Return the health check, with the time that a start may take; a frontend is healthy without a model."""
    path = "health" if workload.is_worker else "live"
    url = f"{_LOOPBACK}:{workload.port}/{path}"
    ask = f"import urllib.request as r; r.urlopen('http://{url}', timeout=4)"
    if workload.has_tls:  # the certificate is for another name
        ask = (
            "import ssl, urllib.request as r; "
            f"r.urlopen('https://{url}', timeout=4, context=ssl._create_unverified_context())"
        )
    seconds = round(settings.options.start_seconds) if workload.is_worker else 60
    return {"test": ["CMD", "python", "-c", ask], **_PULSE, "start_period": f"{seconds}s"}


def _uses_shared(workload: Workload) -> bool:
    return any(SHARED in word for word in workload.args)


def _kv_volume(workload: Workload, disk: Disk) -> str:
    """Return the volume for KV caches on disk. Docker creates it with the rights of the image's folder."""
    if disk.path != KV:
        raise ConfigError(
            f"--kv-offload-disk {disk.path}: containers can write only to {KV}; write it like {KV}:500"
        )
    return f"kv-{workload.name}"


def _escaped(word: str) -> str:
    return word.replace("$", "$$")
