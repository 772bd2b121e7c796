"""Writes the Kubernetes objects of a gateway: its pods, its way in, and who may reach the frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.export import pod
from dynamo_vllm.export.gateway import (
    CONTROL,
    DATA,
    DATABASE,
    ENVOY,
    KEY,
    MODELS,
    SOCKETS,
    SQLITE,
    STATUS_PORTS,
)
from dynamo_vllm.export.workload import PRE_STOP_SECONDS, grace_seconds

if TYPE_CHECKING:
    from dynamo_vllm.config.topology import Values
    from dynamo_vllm.export.gateway import Gateway
    from dynamo_vllm.export.settings import Document, Settings

FILE = "gateway.yaml"
PART, FRONTEND = "gateway", "frontend"
TLS = "/tls"
HTTPS_PORT = 443
_HTTP = "http"
_RESOURCES = {
    CONTROL: {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
    ENVOY: {"requests": {"cpu": "1", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
}
_LAST_PORT = 65535


def objects(found: Gateway, settings: Settings) -> list[Document]:
    """Return the objects of a gateway; several on a database of one are refused."""
    if settings.options.gateways > 1 and not found.is_shared:
        raise ConfigError(
            f"--gateways {settings.options.gateways}: SQLite is a file of one gateway; add 'database: "
            "postgresql://USER@HOST/NAME' to the section gateway of the file, or leave --gateways out"
        )
    route = [http_route(found, settings)] if settings.options.gateway_api else []
    return [
        service(found, settings),
        *route,
        deployment(found, settings),
        settings.disruption_budget(PART),
        frontend_policy(found, settings),
    ]


def notes(found: Gateway, settings: Settings) -> list[str]:
    """Return what a reader of the files should know of the gateway."""
    said = []
    if not found.is_shared:
        said.append(
            f"there is one gateway: its database is SQLite, a file on the claim {settings.full_name(PART)}; "
            "several need PostgreSQL, 'database: postgresql://USER@HOST/NAME' in the section gateway"
        )
    elif settings.options.image is None:
        said.append(
            "PostgreSQL needs an image with the extra postgres (--build-arg EXTRAS=postgres): --image"
        )
    if not has_tls(found, settings) and not settings.options.gateway_api:
        said.append(
            f"the Service {settings.full_name(PART)} is for this cluster only, since keys would travel in "
            "plain text; add --gateway-tls-secret or --gateway-api for other clients"
        )
    return said


def has_tls(found: Gateway, settings: Settings) -> bool:
    return bool(found.tls or settings.options.gateway_tls_secret)


# --- pods -----------------------------------------------------------------------------------------------


def deployment(found: Gateway, settings: Settings) -> Document:
    """Return the pods. Two must not open one SQLite file, so its pod ends before the next one starts."""
    rolling: Document = {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": settings.metadata(settings.full_name(PART), PART),
        "spec": {
            "replicas": settings.options.gateways,
            "selector": {"matchLabels": settings.labels(PART)},
            "strategy": rolling if found.is_shared else {"type": "Recreate"},
            "template": {"metadata": {"labels": settings.labels(PART)}, "spec": pod_spec(found, settings)},
        },
    }


def pod_spec(found: Gateway, settings: Settings) -> Document:
    """Return a pod with the control app as a sidecar: it starts before Envoy and ends after it."""
    return {
        "serviceAccountName": settings.name,
        "automountServiceAccountToken": settings.discovery == "kubernetes",
        **pod.base(grace_seconds(found.drain_seconds)),
        "initContainers": [{**container(CONTROL, found, settings), "restartPolicy": "Always"}],
        "containers": [
            {
                **container(ENVOY, found, settings),
                "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
            }
        ],
        "volumes": volumes(found, settings),
    }


def container(part: str, found: Gateway, settings: Settings) -> Document:
    words = found.args(part, settings.full_name(FRONTEND), _more(part, found, settings))
    status = f"{part}-status"
    ports = [{"name": status, "containerPort": STATUS_PORTS[part]}]
    if part == ENVOY:
        ports = [{"name": _HTTP, "containerPort": found.port}, *ports]
    return {
        "name": part,
        "image": settings.image,
        "command": [pod.COMMAND],
        "args": [pod.escaped(word) for word in words],
        "env": control_env(found, settings) if part == CONTROL else [pod.variable("HOME", "/tmp")],
        "ports": ports,
        "resources": _RESOURCES[part],
        **pod.live_probes(status),
        "securityContext": pod.LOCKED_DOWN,
        "volumeMounts": _mounts(part, found, settings),
    }


def _more(part: str, found: Gateway, settings: Settings) -> Values:
    """Return the options that follow from the way in; only Envoy sees the certificate."""
    more: dict[str, object] = {}
    if settings.options.gateway_api and "trusted_proxies" not in found.options:
        more["trusted_proxies"] = 1
    if part == ENVOY and settings.options.gateway_tls_secret:
        more |= {"tls_cert_path": f"{TLS}/tls.crt", "tls_key_path": f"{TLS}/tls.key"}
    elif part == ENVOY:
        more |= found.tls
    return more


def control_env(found: Gateway, settings: Settings) -> list[Document]:
    """Return the variables of the control app, which joins the discovery. Only it knows keys and database."""
    secrets = [pod.from_secret(name, settings.secret, optional=False) for name in found.secrets]
    if KEY not in found.secrets:
        secrets.append(pod.from_secret(KEY, settings.secret, optional=True))
    if not found.is_shared:
        secrets.append(pod.variable(DATABASE, SQLITE))
    return [*pod.discovery(settings), *pod.planes(settings), pod.variable("HOME", "/tmp"), *secrets]


def _mounts(part: str, found: Gateway, settings: Settings) -> list[Document]:
    mounts: list[Document] = [
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "sockets", "mountPath": SOCKETS},
    ]
    if part == CONTROL:
        return [*mounts, {"name": "data", "mountPath": DATA}]
    if settings.options.gateway_tls_secret:
        mounts.append({"name": "tls", "mountPath": TLS, "readOnly": True})
    elif found.tls:
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True})
    return mounts


def volumes(found: Gateway, settings: Settings) -> list[Document]:
    made: list[Document] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "sockets", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": settings.full_name(PART)}},
    ]
    if settings.options.gateway_tls_secret:
        made.append({"name": "tls", "secret": {"secretName": settings.options.gateway_tls_secret}})
    elif found.tls:
        made.append({"name": "models", "persistentVolumeClaim": {"claimName": settings.claim}})
    return made


def claim(found: Gateway, settings: Settings) -> Document:
    """Return the claim for clients' files, which all gateways share, and for SQLite."""
    spec: Document = {
        "accessModes": ["ReadWriteMany" if found.is_shared else "ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{settings.options.gateway_gb}Gi"}},
    }
    of_models = settings.options.cache_class if found.is_shared else None
    if chosen := settings.options.gateway_class or of_models:
        spec["storageClassName"] = chosen
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": settings.metadata(settings.full_name(PART), PART),
        "spec": spec,
    }


# --- the way in -----------------------------------------------------------------------------------------


def service(found: Gateway, settings: Settings) -> Document:
    """Return the Service of clients; without TLS it has no load balancer, so that no key travels openly."""
    tls = has_tls(found, settings)
    port: Document = {"name": "https", "port": HTTPS_PORT} if tls else {"name": _HTTP, "port": found.port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": settings.discovered(settings.full_name(PART), PART),
        "spec": {
            "type": "LoadBalancer" if tls and not settings.options.gateway_api else "ClusterIP",
            "selector": settings.labels(PART),
            "ports": [{**port, "targetPort": _HTTP}],
        },
    }


def http_route(found: Gateway, settings: Settings) -> Document:
    """Return the route from an existing Gateway. A duration of 0 means no limit: streams take long."""
    if found.tls:
        raise ConfigError(
            f"--gateway-api {settings.options.gateway_api} ends TLS itself; leave tls_cert_path and "
            "tls_key_path out of the file"
        )
    *namespace, name = str(settings.options.gateway_api).split("/")
    spec: Document = {"parentRefs": [{"name": name, **({"namespace": namespace[0]} if namespace else {})}]}
    if settings.options.hostname:
        spec["hostnames"] = [settings.options.hostname]
    rule = {
        "timeouts": {"request": "0s", "backendRequest": "0s"},
        "backendRefs": [{"name": settings.full_name(PART), "port": found.port}],
    }
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": settings.metadata(settings.full_name(PART), PART),
        "spec": {**spec, "rules": [rule]},
    }


def frontend_policy(found: Gateway, settings: Settings) -> Document:
    """Return who may reach the frontends: gateways their HTTP port, pods of the deployment the others.

    Workers send answers to other ports of a frontend, and frontends talk to each other.
    """
    around = [(1, found.port - 1), (found.port + 1, _LAST_PORT)]
    others = [{"protocol": "TCP", "port": first, "endPort": last} for first, last in around if first <= last]
    ingress = [
        _rule({"podSelector": {"matchLabels": settings.labels(PART)}}, [_http_port(found)]),
        _rule({"podSelector": {"matchLabels": settings.labels()}}, others),
    ]
    return _policy(settings.full_name(FRONTEND), ingress, settings)


def _policy(name: str, ingress: list[Document], settings: Settings) -> Document:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": settings.metadata(name, FRONTEND),
        "spec": {
            "podSelector": {"matchLabels": settings.labels(FRONTEND)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _rule(source: Document, ports: list[Document]) -> Document:
    return {"from": [source], "ports": ports}


def _http_port(found: Gateway) -> Document:
    return {"protocol": "TCP", "port": found.port}


# --- metrics --------------------------------------------------------------------------------------------


def monitoring(found: Gateway, settings: Settings) -> list[Document]:
    """Return what Prometheus scrapes of a gateway, and its leave to scrape the frontend behind it."""
    labels = [
        {"targetLabel": "job", "replacement": "dynamo-vllm-gateway"},
        {
            "sourceLabels": ["__meta_kubernetes_pod_name", "__meta_kubernetes_pod_container_name"],
            "separator": "/",
            "targetLabel": "process",
        },
    ]
    scraped = [
        {"port": f"{part}-status", "path": "/metrics", "interval": "15s", "relabelings": labels}
        for part in (CONTROL, ENVOY)
    ]
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": settings.metadata(settings.full_name(PART)),
        "spec": {"selector": {"matchLabels": settings.labels(PART)}, "podMetricsEndpoints": scraped},
    }
    prometheus = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    policy = _policy(
        settings.full_name(f"{FRONTEND}-metrics"), [_rule(prometheus, [_http_port(found)])], settings
    )
    return [monitor, policy]
