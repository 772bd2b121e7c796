"""Writes plain Kubernetes objects: files of documents for `kubectl apply`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm.export import k8s_gateway, pod
from dynamo_vllm.export.settings import GROUP
from dynamo_vllm.export.workload import LEADER, SYSTEM_PORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.export.settings import Document, Settings
    from dynamo_vllm.export.workload import Workload, Workloads

RECORDS = "dynamoworkermetadatas"
CRD_FILE, MONITORING_FILE, KUSTOMIZATION = "crd.yaml", "monitoring.yaml", "kustomization.yaml"
Files = dict[str, list["Document"]]


def files(found: Workloads, settings: Settings) -> Files:
    """Return the documents by file name, in the order in which they are applied."""
    made: Files = {}
    if settings.discovery == "kubernetes":
        made[CRD_FILE] = [crd()]
    made["access.yaml"] = access(settings)
    if claims := storage(found, settings):
        made["storage.yaml"] = claims
    for workload in found.all:
        made[f"{workload.name}.yaml"] = objects(workload, settings)
    if found.gateway is not None:
        made[k8s_gateway.FILE] = k8s_gateway.objects(found.gateway, settings)
    made[MONITORING_FILE] = monitoring(found, settings)
    made[KUSTOMIZATION] = [kustomization(made)]
    return {name: documents for name, documents in made.items() if documents}


def kustomization(made: Files) -> Document:
    """Return the kustomization with what a deployment needs, without what is for the whole cluster."""
    apart = (CRD_FILE, MONITORING_FILE)
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name, documents in made.items() if name not in apart and documents],
    }


# --- objects shared by all groups -----------------------------------------------------------------------


def crd() -> Document:
    """Define the runtime's record of each worker. The Dynamo operator installs the same definition."""
    data = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {"type": "object", "required": ["data"], "properties": {"data": data}}
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{RECORDS}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": "DynamoWorkerMetadata",
                "listKind": "DynamoWorkerMetadataList",
                "plural": RECORDS,
                "singular": "dynamoworkermetadata",
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def access(settings: Settings) -> list[Document]:
    """Return the pods' account. It has rights only with Kubernetes discovery."""
    found = []
    if settings.options.kube_namespace:
        metadata = {"name": settings.options.kube_namespace, "labels": settings.labels()}
        found.append({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    metadata = settings.metadata(settings.name)
    found.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    if settings.discovery != "kubernetes":
        return found
    subject: Document = {"kind": "ServiceAccount", "name": settings.name}
    if settings.options.kube_namespace:
        subject["namespace"] = settings.options.kube_namespace
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules()}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": settings.name},
        "subjects": [subject],
    }
    return [*found, role, binding]


def rules() -> list[Document]:
    """Return the rights that runtime 1.6.1 needs: watch both kinds, and write a record for each process."""
    return [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
        {
            "apiGroups": [GROUP],
            "resources": [RECORDS],
            "verbs": ["list", "watch", "create", "patch"],
        },
    ]


def storage(found: Workloads, settings: Settings) -> list[Document]:
    claims = []
    if settings.options.cache_claim is None:
        claims.append(_claim(settings, settings.claim, settings.options.cache_gb))
    if sharing := [workload for workload in found.workers if workload.shares_embeddings]:
        claims.append(_claim(settings, settings.full_name("embeddings"), 8 * len(sharing)))
    if found.gateway is not None:
        claims.append(k8s_gateway.claim(found.gateway, settings))
    return claims


def _claim(settings: Settings, name: str, gib: int) -> Document:
    spec: Document = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": f"{gib}Gi"}},
    }
    if settings.options.cache_class:
        spec["storageClassName"] = settings.options.cache_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": settings.metadata(name),
        "spec": spec,
    }


# --- frontend and workers -------------------------------------------------------------------------------


def objects(workload: Workload, settings: Settings) -> list[Document]:
    """Return the objects of one group: Service, workload and disruption budget."""
    found = [service(workload, settings)]
    if workload.nodes > 1:
        for number in range(workload.count):
            found += spread(workload, settings, number)
    else:
        found.append(deployment(workload, settings))
    return [*found, settings.disruption_budget(workload.name)]


def service(workload: Workload, settings: Settings) -> Document:
    """Return a Service. Clients use the frontend's; a worker's tells the runtime which pods are ready."""
    name = settings.full_name(workload.name)
    metadata = settings.discovered(name, workload.name)
    spec: Document = {
        "selector": settings.labels(workload.name),
        "ports": [_service_port(workload)],
    }
    if workload.is_worker:
        spec = {"clusterIP": "None", **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _service_port(workload: Workload) -> Document:
    name = pod.port_name(workload)
    return {"name": name, "port": workload.port, "targetPort": name}


def deployment(workload: Workload, settings: Settings) -> Document:
    replicas = workload.count if workload.is_worker else settings.options.frontends
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": settings.metadata(settings.full_name(workload.name), workload.name),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": settings.labels(workload.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _steps(workload, settings, replicas)},
            # A new pod starts slowly; the startup probe allows for that.
            "progressDeadlineSeconds": round(settings.options.start_seconds) + 600,
            "template": template(workload, settings, settings.labels(workload.name)),
        },
    }


def _steps(workload: Workload, settings: Settings, replicas: int) -> Document:
    """Return the rollout strategy: if others serve, a GPU worker stops before its successor starts."""
    makes_room = settings.gpus(workload) > 0 and replicas > 1
    return {"maxUnavailable": int(makes_room), "maxSurge": int(not makes_room)}


def template(workload: Workload, settings: Settings, labels: Document) -> Document:
    main = pod.container(workload, settings, env(workload, settings), "main")
    spec: Document = {
        "serviceAccountName": settings.name,
        "automountServiceAccountToken": settings.discovery == "kubernetes",
        **pod.spec(workload, settings, main),
    }
    return {"metadata": {"labels": labels}, "spec": spec}


def env(workload: Workload, settings: Settings) -> list[Document]:
    """Return the variables of discovery, and those that say where the process listens."""
    found = pod.discovery(settings)
    if settings.discovery != "kubernetes" and workload.nodes > 1:
        found.append(pod.from_field("POD_NAMESPACE", "metadata.namespace"))
    return [*found, *pod.planes(settings), *reach(workload)]


def reach(workload: Workload) -> list[Document]:
    if not workload.is_worker:
        return [pod.variable("DYN_HTTP_HOST", "0.0.0.0")]
    found = [pod.variable("DYN_SYSTEM_PORT", str(SYSTEM_PORT))]
    return [*found, pod.from_field("NODE_RANK", pod.POD_INDEX)] if workload.nodes > 1 else found


def spread(workload: Workload, settings: Settings, number: int) -> list[Document]:
    """Return one worker over several pods: the first serves, the others run engines for it.

    They are identified by index, and by name before they are ready. All must have the same version, so
    nothing replaces them one by one.
    """
    name = settings.full_name(workload.name) + (f"-{number}" if workload.count > 1 else "")
    labels = {**settings.labels(workload.name), "dynamo-vllm/worker": str(number)}
    nodes_name = f"{name}-nodes"
    leader = f"{name}-0.{nodes_name}.$(POD_NAMESPACE).svc.cluster.local"
    words = tuple(word.replace(LEADER, leader) for word in workload.args)
    if not any(word.startswith("--node-peers") for word in words):  # the Service's name leads to its pods
        words = (*words, "--node-peers", f"{nodes_name}.$(POD_NAMESPACE).svc.cluster.local")
    nodes = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": settings.metadata(nodes_name, workload.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [_service_port(workload)],
        },
    }
    stateful = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": settings.metadata(name, workload.name),
        "spec": {
            "serviceName": nodes_name,
            "replicas": workload.nodes,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": labels},
            "template": template(dataclasses.replace(workload, args=words), settings, labels),
        },
    }
    return [nodes, stateful]


# --- metrics --------------------------------------------------------------------------------------------


def monitoring(found: Workloads, settings: Settings) -> list[Document]:
    """Return the monitors for Prometheus' operator: the frontend by its Service, each worker by its pod."""
    monitors = [
        _monitor("ServiceMonitor", "endpoints", settings, [found.frontend]),
        _monitor("PodMonitor", "podMetricsEndpoints", settings, found.workers),
    ]
    return (
        monitors if found.gateway is None else [*monitors, *k8s_gateway.monitoring(found.gateway, settings)]
    )


def _monitor(kind: str, key: str, settings: Settings, workloads: Sequence[Workload]) -> Document:
    part = "app.kubernetes.io/component"
    job = "dynamo-vllm-frontend" if kind == "ServiceMonitor" else "dynamo-vllm-worker"
    # The names that the rules and the dashboard in deploy/observability use.
    labels = [
        {"targetLabel": "job", "replacement": job},
        {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "process"},
    ]
    scraped: Document = {"port": pod.port_name(workloads[0]), "path": "/metrics", "interval": "15s"}
    if workloads[0].has_tls:
        # Pods are scraped by address, and no certificate is for an address.
        scraped |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    values = [workload.name for workload in workloads]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": kind,
        "metadata": settings.metadata(
            settings.full_name("frontend" if kind == "ServiceMonitor" else "workers")
        ),
        "spec": {
            "selector": {
                "matchLabels": settings.labels(),
                "matchExpressions": [{"key": part, "operator": "In", "values": values}],
            },
            key: [{**scraped, "relabelings": labels}],
        },
    }
