"""Every manifest under deploy/ is what export makes today, valid for its reader, and startable."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from generate import examples, manifests

from deploy import manifests as read
from dynamo_vllm.config import build, checks, worker_plan
from dynamo_vllm.config.options import FrontendOptions, GatewayOptions, WorkerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.manifests import Document

EXAMPLES = sorted(manifests.EXAMPLES)
K8S = [name for name in EXAMPLES if name.startswith("k8s/")]
RECIPES = [f"recipes/{folder}/k8s" for folder in examples.EXPORTS]
COMPOSE = [name for name in EXAMPLES if name.startswith("compose/")]
ASKED_FOR = {
    *("aggregated", "kv-router", "disaggregated", "data-parallel", "lora", "multimodal", "omni"),
    "gateway",
}
OPTIONS = {"frontend": FrontendOptions, "gateway": GatewayOptions, "worker": WorkerOptions}


@functools.cache
def read_once(example: str) -> list[Document]:
    folder = read.ROOT / "deploy" / example
    texts = {path.name: path.read_text() for path in folder.glob("*.yaml") if path.name != "serve.yaml"}
    return read.documents(texts)


def found(example: str) -> list[Document]:
    return copy.deepcopy(read_once(example))


def parse(argv: Sequence[str], env: dict[str, str]) -> None:
    """As the command does before it starts anything."""
    if argv[0] == "frontend":
        front, rest = build.parse(FrontendOptions, argv[1:], env, "prog", "")
        assert not rest
        checks.check_frontend(front)
        assert front.host == "0.0.0.0"
    elif argv[0] == "gateway":
        gateway, rest = build.parse(GatewayOptions, argv[1:], env, "prog", "")
        assert not rest
        checks.check_gateway(gateway, elsewhere=True)
        assert (gateway.host, gateway.system_host) == ("0.0.0.0", "0.0.0.0")
        assert gateway.part in ("control", "envoy")
    else:
        assert argv[0] == "worker"
        plan = worker_plan.parse(argv[1:], env)
        checks.check_worker(plan, elsewhere=True)
        worker = plan.options
        assert worker.system_port == 9090
        assert worker.discovery_backend in ("kubernetes", "etcd")


@pytest.mark.parametrize("example", EXAMPLES)
def test_is_what_export_makes(example: str) -> None:
    assert manifests.stale(example) == []


def test_there_is_one_for_everything_asked_for() -> None:
    assert {name.removeprefix("k8s/") for name in K8S} >= ASKED_FOR
    folders = (read.ROOT / "deploy").glob("*/*/serve.yaml")
    generated = {path.parent.relative_to(read.ROOT / "deploy").as_posix() for path in folders}
    assert {name for name in generated if name.split("/")[0] in ("k8s", "compose")} == set(EXAMPLES)


@pytest.mark.parametrize("example", [*K8S, *RECIPES])
def test_kubernetes_takes_it(example: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, or make venv-dev")
    for document in found(example):
        read.validate(document)


def test_a_wrong_field_is_seen() -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, or make venv-dev")
    wrong = next(document for document in found("k8s/aggregated") if document["kind"] == "Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    with pytest.raises(Exception, match="readyProbe"):
        read.validate(wrong)
    (graph,) = [document for document in found("k8s/operator") if "Graph" in document["kind"]]
    graph["spec"]["components"][0]["componentType"] = "worker"
    with pytest.raises(jsonschema.ValidationError, match="componentType"):
        read.validate(graph)


@pytest.mark.parametrize("example", [*K8S, *RECIPES])
def test_every_command_parses(example: str) -> None:
    started = list(read.containers(found(example)))
    assert len(started) >= 2
    for container in started:
        assert container["command"] == ["dynamo-vllm"]
        env = read.environment(container, NODE_RANK="0", POD_NAMESPACE="models")
        # The operator adds these itself.
        if example == "k8s/operator":
            env["DYN_DISCOVERY_BACKEND"] = "kubernetes"
        parse(read.arguments(container, env), env)


@pytest.mark.parametrize("example", COMPOSE)
def test_every_command_of_a_compose_file_parses(example: str) -> None:
    (document,) = found(example)
    for service in document["services"].values():
        if service.get("entrypoint") == ["dynamo-vllm"]:
            parse([word.replace("$$", "$") for word in service["command"]], service["environment"])


@pytest.mark.parametrize("example", COMPOSE)
def test_compose_takes_it(example: str) -> None:
    (document,) = found(example)
    jsonschema.validate(document, yaml.safe_load((read.SCHEMAS / "compose.yaml").read_text()))
    services = document["services"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in document["volumes"]
    owned = [gpu for service in services.values() for gpu in _gpu_ids(service)]
    assert len(owned) == len(set(owned))
    assert bool(owned) == (example != "compose/prompt-embeds")


def _gpu_ids(service: Document) -> list[str]:
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    return [gpu for device in devices for gpu in device["device_ids"]]


@pytest.mark.parametrize("example", [*K8S, *RECIPES])
def test_pods_are_locked_down(example: str) -> None:
    for document in found(example):
        for template in read.templates(document):
            spec = template["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] > 0
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in spec["containers"]:
                held = container["securityContext"]
                assert held["allowPrivilegeEscalation"] is False
                assert held["readOnlyRootFilesystem"] is True
                assert held["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["limits"]["memory"]
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                assert mounted <= {volume["name"] for volume in spec["volumes"]} | {"shm"}


@pytest.mark.parametrize("example", [*K8S, *RECIPES])
def test_no_request_is_cut_off_by_the_grace_period(example: str) -> None:
    for document in found(example):
        for template in read.templates(document):
            (container,) = template["spec"]["containers"]
            env = read.environment(container, NODE_RANK="0")
            argv = read.arguments(container, env)
            options: Any = build.parse(OPTIONS[argv[0]], argv[1:], env, "prog", "")[0]
            pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            # What serve gives a process to leave, beside the time its requests have.
            assert template["spec"]["terminationGracePeriodSeconds"] >= pause + options.drain_seconds + 10


@pytest.mark.parametrize("example", K8S)
def test_objects_find_each_other(example: str) -> None:
    """Selectors meet the pods they are for, claims and accounts are there, names are unique."""
    every = found(example)
    names = [(document["kind"], document.get("metadata", {}).get("name")) for document in every]
    assert len(names) == len(set(names))
    kinds = {kind: [document for document in every if document["kind"] == kind] for kind, _ in names}
    pods = [
        template["metadata"]["labels"]
        for d in every
        for template in read.templates(d)
        if "metadata" in template
    ]
    for service in kinds.get("Service", ()):
        assert any(service["spec"]["selector"].items() <= labels.items() for labels in pods)
    for budget in kinds.get("PodDisruptionBudget", ()):
        assert any(budget["spec"]["selector"]["matchLabels"].items() <= labels.items() for labels in pods)
    claims = {claim["metadata"]["name"] for claim in kinds.get("PersistentVolumeClaim", ())}
    for document in every:
        for template in read.templates(document):
            for volume in template["spec"]["volumes"]:
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims
    (kustomization,) = kinds["Kustomization"]
    for name in kustomization["resources"]:
        assert (read.ROOT / "deploy" / example / name).is_file()


def test_nodes_of_one_worker_share_its_ranks_out() -> None:
    (container,) = [c for c in read.containers(found("k8s/data-parallel")) if c["args"][0] == "worker"]
    nodes, peers = [], set()
    for rank in ("0", "1"):
        env = read.environment(container, NODE_RANK=rank, POD_NAMESPACE="models")
        argv = read.arguments(container, env)
        plan = worker_plan.parse(argv[1:], env)
        checks.check_worker(plan, elsewhere=True)
        nodes.append(plan.node)
        peers.add(plan.options.node_peers)
    assert [node.is_headless for node in nodes] == [False, True]
    assert [node.first_rank for node in nodes] == [0, 8]
    assert nodes[0].has_followers
    assert peers == {("qwen-dp-worker-nodes.models.svc.cluster.local",)}
    assert {node.leader for node in nodes} == {
        "qwen-dp-worker-0.qwen-dp-worker-nodes.models.svc.cluster.local"
    }
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
