"""From exported documents back to a topology: what a cluster was told, as `serve` would be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import build
from dynamo_vllm.config.options import FrontendOptions, GatewayOptions, GatewaySettings, WorkerOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.export import operator
from dynamo_vllm.export.settings import USER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.export.settings import Document

_OURS = {
    "DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE",
    "NATS_SERVER", "HOME", "HF_HOME", "HF_TOKEN", "DYN_SYSTEM_PORT", "DYN_HTTP_HOST", "POD_NAME",
    "POD_NAMESPACE", "POD_UID", "NODE_RANK", "DYN_VLLM_ENGINES_HERE",
    "DYN_VLLM_USAGE_DIR",
}  # fmt: skip
_SECRETS = {"VLLM_API_KEY": "api_key", "DYN_VLLM_GATEWAY_DATABASE": "database"}
_SECRET = {"api_key": "only-in-a-secret", "database": "postgresql://only-in-a-secret"}
_PLANES = ("request_plane", "event_plane")
_OF_NODES = ("--node-rank", "--master-addr")


def from_kubernetes(documents: Iterable[Document]) -> Topology:
    """Plain objects or the operator's, in their order."""
    frontend: dict[str, Any] = {}
    gateway: dict[str, Any] | None = None
    groups: list[WorkerGroup] = []
    for main, replicas, kind in _containers(documents):
        args = [word.replace("$$(", "$(") for word in main["args"]]
        env = {item["name"]: item["value"].replace("$$(", "$(") for item in main["env"] if "value" in item}
        if args[0] == "frontend":
            frontend = {**_frontend(args), **_planes(env, _PLANES)}
        elif args[0] == "gateway":
            frontend |= _certificate(args)
            if "--part=control" in args:
                secret = [item["name"] for item in main["env"] if _is_needed(item)]
                gateway = _gateway(args, secret)
        elif kind == "StatefulSet":  # one for each worker
            group = _group(args, env, 1)
            if groups and _alike(groups[-1], group):
                groups[-1] = WorkerGroup(groups[-1].count + 1, group.options, group.env, group.args)
            else:
                groups.append(group)
        else:
            groups.append(_group(args, env, replicas))
    return Topology(frontend=frontend, gateway=gateway, workers=tuple(groups))


def from_compose(document: Document) -> Topology:
    """Every worker is a service, and becomes a group of its own."""
    frontend: dict[str, Any] = {}
    gateway: dict[str, Any] | None = None
    groups = []
    for found in document["services"].values():
        if found.get("user") != f"{USER}:{USER}":
            continue
        args = [word.replace("$$", "$") for word in found["command"]]
        if args[0] == "frontend":
            frontend = {**_frontend(args), **_planes(found["environment"], _PLANES[:1])}
            continue
        if args[0] == "gateway":
            frontend |= _certificate(args)
            if "--part=control" in args:
                needed = [name for name, value in found["environment"].items() if ":?" in value]
                gateway = _gateway(args, needed)
            continue
        env = {
            name: value.replace("$$", "$")
            for name, value in found["environment"].items()
            if not value.startswith("${")
        }
        groups.append(_group(args, env | _gpus(found), 1))
    return Topology(frontend=frontend, gateway=gateway, workers=tuple(groups))


def _containers(documents: Iterable[Document]) -> Iterable[tuple[Document, int, str]]:
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] in ("Deployment", "StatefulSet"):
            inside = spec["template"]["spec"]
            for container in (*inside.get("initContainers", ()), *inside["containers"]):
                yield container, spec["replicas"], document["kind"]
        elif document["kind"] == operator.KIND:
            for component in spec["components"]:
                main = component["podTemplate"]["spec"]["containers"][0]
                yield main, component["replicas"], document["kind"]


def _frontend(args: Sequence[str]) -> dict[str, Any]:
    values, _ = build.parser(FrontendOptions, "", "").parse_known_args(list(args[1:]))
    return dict(vars(values))


def _gateway(args: Sequence[str], secrets: Sequence[str]) -> dict[str, Any]:
    """The section of the file; a value that only a Secret has is one of ours."""
    values = vars(build.parser(GatewayOptions, "", "").parse_known_args(list(args[1:]))[0])
    names = {item.name for item in build.declared(GatewaySettings)} - {"data_dir"}
    found = {name: value for name, value in values.items() if name in names}
    return found | {_SECRETS[name]: _SECRET[_SECRETS[name]] for name in secrets if name in _SECRETS}


def _certificate(args: Sequence[str]) -> dict[str, Any]:
    values = vars(build.parser(GatewayOptions, "", "").parse_known_args(list(args[1:]))[0])
    return {name: value for name, value in values.items() if name.startswith("tls_")}


def _is_needed(item: Document) -> bool:
    ref = item.get("valueFrom", {}).get("secretKeyRef", {"optional": True})
    return not ref.get("optional", False)


def _planes(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: "nats" for name in names if env.get(f"DYN_{name.upper()}") == "nats"}


def _group(args: Sequence[str], env: Mapping[str, str], count: int) -> WorkerGroup:
    values, rest = build.parser(WorkerOptions, "", "").parse_known_args(list(args[1:]))
    kept = {name: value for name, value in env.items() if name not in _OURS}
    options = dict(vars(values))
    if all(peer.endswith(".svc.cluster.local") for peer in options.get("node_peers", ())):
        options.pop("node_peers", None)  # the Service of its nodes, which the export has named
    return WorkerGroup(count, options, kept, tuple(_without(rest, _OF_NODES)))


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    found, skip = [], False
    for word in words:
        if skip or word in flags:
            skip = word in flags
        else:
            found.append(word)
    return found


def _gpus(found: Document) -> dict[str, str]:
    devices = found.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[0]["device_ids"])} if devices else {}


def _alike(one: WorkerGroup, other: WorkerGroup) -> bool:
    return (one.options, one.env, one.args) == (other.options, other.env, other.args)
