"""Options of `export`: what a cluster needs besides the `serve` file."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

KINDS = ("k8s", "compose")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """A `serve` file as Kubernetes manifests or a compose file."""

    config: str | None = opt(
        None,
        "export",
        "The file that 'dynamo-vllm serve --config' takes.",
        env="DYN_VLLM_SERVE_CONFIG",
        metavar="FILE",
    )
    output: str | None = opt(
        None,
        "export",
        "Folder for the output; created if missing.",
        env="DYN_VLLM_EXPORT_OUTPUT",
        flags=("--output", "-o"),
        metavar="FOLDER",
    )
    force: bool = opt(
        False,
        "export",
        "Write into a folder that is not empty and overwrite files of an earlier export; other files stay.",
        env="DYN_VLLM_EXPORT_FORCE",
    )
    model: str | None = opt(
        None,
        "what runs",
        "Hub id of the model, or its folder below /models; overrides the file's.",
        env="DYN_VLLM_EXPORT_MODEL",
        metavar="MODEL",
    )
    name: str = opt(
        "dynamo-vllm",
        "what runs",
        "Name of the deployment, and prefix of every object's name.",
        env="DYN_VLLM_EXPORT_NAME",
        metavar="NAME",
    )
    image: str | None = opt(
        None,
        "what runs",
        "Image of frontend and workers (default: dynamo-vllm:VERSION-DEVICE, as in the Dockerfile).",
        env="DYN_VLLM_EXPORT_IMAGE",
        metavar="IMAGE",
    )
    device: str = opt(
        "cuda", "what runs", "Device of the engines.", env="DYN_VLLM_EXPORT_DEVICE", choices=DEVICES
    )
    frontends: int = opt(
        1, "what runs", "Number of frontends, in Kubernetes.", env="DYN_VLLM_EXPORT_FRONTENDS", metavar="N"
    )
    start_seconds: float = opt(
        1800.0,
        "what runs",
        "How long a worker may take to be ready, including the download of its model, before it is "
        "restarted.",
        env="DYN_VLLM_EXPORT_START_SECONDS",
        metavar="SECONDS",
    )
    worker_cpus: int | None = opt(
        None,
        "resources",
        "CPU cores per worker (default: 4, or 4 per GPU).",
        env="DYN_VLLM_EXPORT_WORKER_CPUS",
        metavar="N",
    )
    worker_memory_gb: int | None = opt(
        None,
        "resources",
        "Memory of a worker in GiB, including shared memory (default: 32, or 32 per GPU); --kv-offload-gb "
        "of the file is added.",
        env="DYN_VLLM_EXPORT_WORKER_MEMORY_GB",
        metavar="GIB",
    )
    shm_gb: int = opt(
        8,
        "resources",
        "Shared memory of a worker in GiB; --kv-offload-gb of the file is added.",
        env="DYN_VLLM_EXPORT_SHM_GB",
        metavar="GIB",
    )
    cache_gb: int = opt(
        200,
        "resources",
        "Size of the claim for models, in GiB.",
        env="DYN_VLLM_EXPORT_CACHE_GB",
        metavar="GIB",
    )
    cache_class: str | None = opt(
        None,
        "resources",
        "Storage class of that claim; it must let several nodes write (default: the cluster's).",
        env="DYN_VLLM_EXPORT_CACHE_CLASS",
        metavar="NAME",
    )
    cache_claim: str | None = opt(
        None,
        "resources",
        "An existing claim for models; none is created then.",
        env="DYN_VLLM_EXPORT_CACHE_CLAIM",
        metavar="NAME",
    )
    hf_secret: str = opt(
        "hf-token",
        "resources",
        "Secret whose key HF_TOKEN has the Hugging Face token; pods start without it too.",
        env="DYN_VLLM_EXPORT_HF_SECRET",
        metavar="NAME",
    )
    gateway: bool | None = opt(
        None,
        "gateway",
        "Put a gateway in front: API keys, limits, usage, TLS (default: if the file has a section gateway).",
        env="DYN_VLLM_EXPORT_GATEWAY",
    )
    gateways: int = opt(
        1,
        "gateway",
        "Number of gateways, in Kubernetes; several need PostgreSQL: 'database' in the section gateway.",
        env="DYN_VLLM_EXPORT_GATEWAYS",
        metavar="N",
    )
    gateway_tls_secret: str | None = opt(
        None,
        "gateway",
        "Secret of the type kubernetes.io/tls with the gateway's certificate; its Service is a LoadBalancer "
        "then.",
        env="DYN_VLLM_EXPORT_GATEWAY_TLS_SECRET",
        metavar="NAME",
    )
    gateway_api: str | None = opt(
        None,
        "gateway",
        "An existing Gateway of the Gateway API, NAME or NAMESPACE/NAME, that ends TLS: an HTTPRoute leads "
        "from it to the gateway.",
        env="DYN_VLLM_EXPORT_GATEWAY_API",
        metavar="NAME",
    )
    hostname: str | None = opt(
        None,
        "gateway",
        "Public hostname of the HTTPRoute (default: all of that Gateway).",
        env="DYN_VLLM_EXPORT_HOSTNAME",
        metavar="HOST",
    )
    gateway_gb: int = opt(
        20,
        "gateway",
        "Size of the claim for clients' files, and for SQLite, in GiB.",
        env="DYN_VLLM_EXPORT_GATEWAY_GB",
        metavar="GIB",
    )
    gateway_class: str | None = opt(
        None,
        "gateway",
        "Storage class of that claim; with PostgreSQL it must let several nodes write (default: the "
        "cluster's).",
        env="DYN_VLLM_EXPORT_GATEWAY_CLASS",
        metavar="NAME",
    )
    operator: bool = opt(
        False,
        "cluster",
        "Write one DynamoGraphDeployment for the Dynamo operator, instead of plain objects.",
        env="DYN_VLLM_EXPORT_OPERATOR",
    )
    kube_namespace: str | None = opt(
        None,
        "cluster",
        "Kubernetes namespace to create and use (default: kubectl's current one).",
        env="DYN_VLLM_EXPORT_KUBE_NAMESPACE",
        metavar="NAME",
    )
    discovery: str | None = opt(
        None,
        "cluster",
        "Discovery of workers and frontends (default: kubernetes; compose always uses etcd).",
        env="DYN_VLLM_EXPORT_DISCOVERY",
        choices=("kubernetes", "etcd"),
    )
    etcd: str | None = opt(
        None,
        "cluster",
        "Addresses for --discovery etcd, separated by commas.",
        env="DYN_VLLM_EXPORT_ETCD",
        metavar="URLS",
    )
    nats: str | None = opt(
        None,
        "cluster",
        "NATS server for KV events (default: ZMQ; compose always uses NATS).",
        env="DYN_VLLM_EXPORT_NATS",
        metavar="URL",
    )
