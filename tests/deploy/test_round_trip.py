"""What was exported, read back, is the topology it came from."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from generate import manifests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from deploy import manifests as read
from dynamo_vllm.cli.start.serve import from_file
from dynamo_vllm.config import topology
from dynamo_vllm.config.options import ExportOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.export import compose, k8s, operator, workload, yaml_files
from dynamo_vllm.export.settings import Settings
from dynamo_vllm.supervise.planning import plan as plans
from dynamo_vllm.supervise.planning.gateway import GatewayPlace
from dynamo_vllm.supervise.planning.process import COMMAND
from harness import exported

if TYPE_CHECKING:
    from deploy.manifests import Document
    from dynamo_vllm.export.workload import Workloads

EXAMPLES = sorted(manifests.EXAMPLES)
SERVE_FILES = sorted((read.ROOT / "deploy" / "serve").glob("*.yaml"))
SETTINGS = Settings(ExportOptions(config="serve.yaml", output="out"))


def in_cluster(wanted: Topology, graph: bool = False) -> tuple[Workloads, list[Document]]:
    found = workload.of_cluster(wanted, "kubernetes")
    told = dataclasses.replace(SETTINGS, request_plane=found.request_plane, event_plane=found.event_plane)
    made = operator.files(found, told) if graph else k8s.files(found, told)
    return found, [document for documents in made.values() for document in documents]


def on_machine(wanted: Topology) -> tuple[Workloads, Document]:
    found = workload.of_machine(wanted, gpus=True)
    told = dataclasses.replace(SETTINGS, request_plane=found.request_plane)
    return found, compose.document(found, told)


def without_notes(found: Workloads) -> Workloads:
    """Neither what was said about local settings nor secrets and the wish of an address come back."""
    workers = tuple(dataclasses.replace(worker, secrets=()) for worker in found.workers)
    return dataclasses.replace(found, notes=(), host="", workers=workers)


def assert_comes_back(wanted: Topology) -> None:
    found, made = in_cluster(wanted)
    again, made_again = in_cluster(exported.from_kubernetes(made))
    assert without_notes(again) == without_notes(found)
    if not any(worker.secrets for worker in found.workers):
        assert made_again == made


def assert_comes_back_from_a_graph(wanted: Topology) -> None:
    found, made = in_cluster(wanted, graph=True)
    again, _ = in_cluster(exported.from_kubernetes(made), graph=True)
    assert without_notes(again) == without_notes(found)


def assert_comes_back_from_compose(wanted: Topology) -> None:
    found, made = on_machine(wanted)
    again, _ = on_machine(exported.from_compose(made))
    assert without_notes(again) == without_notes(found)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_comes_back(example: str) -> None:
    wanted = from_file(str(read.ROOT / "deploy" / example / "serve.yaml"))
    assert_comes_back(wanted)
    if example != "k8s/data-parallel":
        assert_comes_back_from_compose(wanted)
    if example != "k8s/data-parallel" and wanted.gateway is None:
        assert_comes_back_from_a_graph(wanted)


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_file_comes_back_with_the_flags_that_serve_would_start(path: Path) -> None:
    wanted = dataclasses.replace(from_file(str(path)), model="org/model")
    assert_comes_back(wanted)
    place = GatewayPlace("/run/gateway", 8000, 9092, 9091) if wanted.gateway is not None else None
    gpus = [str(gpu) for gpu in range(8)]
    plan = plans.make(wanted, {}, Path("/shared/discovery"), gpus, gateway=place)
    served = [process.argv[len(COMMAND) :] for process in plan.processes if "gateway" not in process.argv]
    found = workload.of_machine(wanted, gpus=True)
    local = {"--host=0.0.0.0", "--host=127.0.0.1"}
    assert [worker.args for worker in found.all] == [
        tuple(word for word in argv if word not in local) for argv in served
    ]


def test_containers_without_a_gpu_know_how_many_share_the_machine() -> None:
    wanted = Topology(model="org/model", workers=(WorkerGroup(2), WorkerGroup(args=("-tp", "2"))))
    found = workload.of_machine(wanted, gpus=False)
    assert [worker.env for worker in found.workers] == [{"DYN_VLLM_ENGINES_HERE": "4"}] * 3
    read_back = exported.from_compose(compose.document(found, SETTINGS))
    assert [group.env for group in read_back.workers] == [{}] * 3, "they are counted anew wherever they go"
    assert without_notes(workload.of_machine(read_back, gpus=False)) == without_notes(found)
    on_gpus = workload.of_machine(wanted, gpus=True)
    in_pods = workload.of_cluster(wanted, "kubernetes")  # each has a limit of its own
    assert [worker.env for worker in (*on_gpus.workers, *in_pods.workers)] == [{}] * 5


WORDS = some.text(string.ascii_letters + string.digits + " $(){}'\"\\:#-_.,%äß€", min_size=1, max_size=20)
NAMES = some.text(string.ascii_lowercase, min_size=1, max_size=8)


@some.composite
def groups(draw: some.DrawFn) -> WorkerGroup:
    options: dict[str, Any] = {}
    if draw(some.booleans()):
        options["served_model_name"] = draw(some.lists(NAMES, min_size=1, max_size=3, unique=True))
    if draw(some.booleans()):
        options["drain_seconds"] = draw(some.integers(0, 900))
    if draw(some.booleans()):
        options["direct_egress"] = draw(some.booleans())
    if draw(some.booleans()):
        options["mm_prompt_template"] = "<image>" + draw(WORDS) + "<prompt>"
        options["enable_multimodal"] = True
    if draw(some.booleans()):
        options["admin_token"] = draw(NAMES)
    if draw(some.booleans()):
        options["kv_event_port"] = draw(some.integers(20000, 30000))
    if draw(some.booleans()):
        options |= {"file_kv": "/run/here", "request_plane": "nats"}
    args = draw(
        some.sampled_from([(), ("--tensor-parallel-size", "4"), ("-dp", "8", "-dpl", "4"), ("-tp=2",)])
    )
    env = draw(some.dictionaries(NAMES.map(lambda name: f"MY_{name.upper()}"), WORDS, max_size=3))
    extra = ("--override-generation-config", draw(WORDS)) if draw(some.booleans()) else ()
    return WorkerGroup(draw(some.integers(1, 3)), options, env, (*args, *extra))


GATEWAYS: list[dict[str, Any] | None] = [
    None,
    {},
    {"cors_origin": ["https://a.example", "https://b.example"], "share_cache": True, "header_kb": 8},
    {"api_key": ["long-enough"], "access_log": False},
    {"database": "postgresql://user:password@db/gateway", "trusted_proxies": 2},
    {"database": "sqlite:////here/gateway.db", "data_dir": "/here/files", "envoy_path": "/here/envoy"},
]


def spans_nodes(wanted: Topology) -> bool:
    return any("-dpl" in group.args for group in wanted.workers)


SLOW = [HealthCheck.too_slow]  # which a machine that stops for a second is, and no strategy here


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(
    some.lists(groups(), min_size=1, max_size=3),
    some.integers(1024, 60000),
    some.booleans(),
    some.sampled_from(GATEWAYS),
)
def test_any_topology_comes_back(
    made: list[WorkerGroup], port: int, disaggregated: bool, gateway: dict[str, Any] | None
) -> None:
    roles = ["prefill", "decode"] if disaggregated else []
    more = [WorkerGroup(1, {"disaggregation_mode": role}) for role in roles]
    alone = [
        dataclasses.replace(group, options={**group.options, "component": f"part-{number}"})
        for number, group in enumerate(made)
    ]
    wanted = Topology(model="org/model", frontend={"port": port}, workers=(*alone, *more), gateway=gateway)
    assert_comes_back(wanted)
    if not spans_nodes(wanted):
        assert_comes_back_from_compose(wanted)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(WORDS)
def test_text_says_what_the_documents_say(word: str) -> None:
    document = {"args": [word, "8", "no", "1e3", "0o7", "10:30"], "env": {"A": word}}
    assert yaml.safe_load(yaml_files.yaml_text([document], "k8s")) == document


@pytest.mark.parametrize("gateway", GATEWAYS[1:], ids=str)
def test_gateway_comes_back(gateway: dict[str, Any]) -> None:
    chat = {"namespace": "chat"}
    frontend = {"tls_cert_path": "/models/c.pem", "tls_key_path": "/models/k.pem", "drain_seconds": 7}
    for wanted in (
        Topology(model="org/model", gateway=gateway),
        Topology("org/model", {**frontend, **chat}, (WorkerGroup(options=chat),), gateway),
    ):
        assert_comes_back(wanted)
        assert_comes_back_from_compose(wanted)


def test_a_file_that_was_read_as_yaml_comes_back() -> None:
    data = yaml.safe_load("""
        model: org/model
        frontend: {port: 8080, router: round-robin}
        workers:
          - role: encode
          - {role: prefill, route-to-encoder: true, side_channel_port: 5600}
          - {role: decode, env: {VLLM_LOGGING_LEVEL: DEBUG, TRICKY: "$(POD_NAME) $$ ${HOME}"}}
    """)
    wanted = topology.read(data, "serve.yaml")
    assert_comes_back(wanted)
    assert_comes_back_from_compose(wanted)
    found, made = in_cluster(wanted)
    assert [worker.name for worker in found.workers] == ["encode", "prefill", "decode"]
    assert "$$(POD_NAME) $$ ${HOME}" in str(made)
    claims = [d["metadata"]["name"] for d in made if d["kind"] == "PersistentVolumeClaim"]
    assert claims == ["dynamo-vllm-models", "dynamo-vllm-embeddings"]
