"""`dynamo-vllm export`: what it writes, what it says and what it refuses."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.manifests import validate
from dynamo_vllm.cli import main
from dynamo_vllm.export import yaml_files
from dynamo_vllm.export.operator import KIND
from harness.bad_server import make_certificate
from harness.live import live

SERVE = "model: org/model\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {})
    Path("serve.yaml").write_text(SERVE)
    return tmp_path


def run(*argv: str) -> int:
    return main.run(["export", *argv])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run(*argv) == 2
    return capsys.readouterr().err


def test_writes_a_folder_and_says_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("k8s", "--config", "serve.yaml", "-o", "out/new") == 0
    said = capsys.readouterr()
    assert (
        "next: kubectl apply -f out/new/crd.yaml (once per cluster), then kubectl apply -k out/new"
        in said.out
    )
    assert said.err == ""
    names = {path.name for path in Path("out/new").iterdir()}
    assert {"crd.yaml", "frontend.yaml", "worker.yaml", "monitoring.yaml", "kustomization.yaml"} <= names
    for path in Path("out/new").iterdir():
        assert path.read_text().startswith(
            "# Made by: dynamo-vllm export k8s --config serve.yaml -o out/new\n"
        )
    kustomization = yaml.safe_load(Path("out/new/kustomization.yaml").read_text())
    assert names - set(kustomization["resources"]) == {"crd.yaml", "monitoring.yaml", "kustomization.yaml"}


def test_the_same_twice_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compose", "--config", "serve.yaml", "-o", "one") == 0
    first = Path("one/compose.yaml").read_text()
    assert run("compose", "--config", "serve.yaml", "-o", "one", "--force") == 0
    assert Path("one/compose.yaml").read_text() == first


def test_folder_that_is_not_empty_needs_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert "not empty (notes.txt)" in refused(capsys, "k8s", "--config", "serve.yaml", "-o", "out")
    assert run("k8s", "--config", "serve.yaml", "-o", "out", "--force") == 0
    assert Path("out/notes.txt").read_text() == "mine"


def test_the_file_itself_may_lie_in_the_folder() -> None:
    assert run("k8s", "--config", "serve.yaml", "-o", ".") == 0
    assert Path("serve.yaml").read_text() == SERVE


def test_foreign_files_stay_even_with_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/frontend.yaml").write_text("kind: Mine\n")
    said = refused(capsys, "k8s", "--config", "serve.yaml", "-o", "out", "--force")
    assert "out/frontend.yaml was not made by export; move it" in said
    assert [path.name for path in Path("out").iterdir()] == ["frontend.yaml"]


def test_files_of_an_earlier_export_are_named_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.yaml").write_text("model: org/model\nworkers: [{role: prefill}, {role: decode}]\n")
    assert run("k8s", "--config", "two.yaml", "-o", "out") == 0
    assert run("k8s", "--config", "serve.yaml", "-o", "out", "--force") == 0
    assert "out/decode.yaml is from an earlier export and no longer used" in capsys.readouterr().err
    assert yaml_files.is_ours(Path("out/decode.yaml"))


def test_folder_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    assert "-o taken" in refused(capsys, "k8s", "--config", "serve.yaml", "-o", "taken")


def test_local_settings_are_replaced_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("local.yaml").write_text(
        "model: org/model\nfrontend: {discovery_backend: file, host: 127.0.0.1}\n"
        "workers:\n- {file_kv: /run/kv, system_port: 9000, admin_token: s3cret, "
        "env: {CUDA_VISIBLE_DEVICES: '3'}}\n"
    )
    assert run("k8s", "--config", "local.yaml", "-o", "out") == 0
    said = capsys.readouterr().err
    assert "discovery_backend file is replaced: processes find each other by kubernetes" in said
    assert "file_kv /run/kv is replaced" in said
    assert "system_port 9000 is left out" in said
    assert "CUDA_VISIBLE_DEVICES of a group is left out" in said
    assert (
        "DYN_VLLM_ADMIN_TOKEN is not written to any file; put it into the Secret dynamo-vllm-secrets before"
        in said
    )
    written = "".join(path.read_text() for path in Path("out").iterdir())
    assert "s3cret" not in written
    assert "/run/kv" not in written
    assert "CUDA_VISIBLE_DEVICES" not in written
    worker = [
        document
        for document in yaml.safe_load_all(Path("out/worker.yaml").read_text())
        if document["kind"] == "Deployment"
    ][0]
    env = worker["spec"]["template"]["spec"]["containers"][0]["env"]
    secret = {"name": "dynamo-vllm-secrets", "key": "DYN_VLLM_ADMIN_TOKEN"}
    assert {"name": "DYN_VLLM_ADMIN_TOKEN", "valueFrom": {"secretKeyRef": secret}} in env


@pytest.mark.parametrize(
    ("serve", "argv", "said"),
    [
        ("workers: [{}]", (), "the file names no model"),
        ("model: /data/model", (), "--model /data/model is a path of this machine"),
        ("model: /models/../data", (), "is a path of this machine"),
        (
            "model: org/model\nworkers: [{custom_jinja_template: chat.jinja}]",
            (),
            "--custom-jinja-template chat.jinja is a path of this machine",
        ),
        (
            "model: org/model\nfrontend: {tls_cert_path: /etc/c.pem, tls_key_path: /etc/k.pem}",
            (),
            "--tls-cert-path /etc/c.pem is a path of this machine",
        ),
        (
            "model: org/model\nworkers: [{lora_enabled: true, lora_modules: ['a=hf://x/y', 'b=/data/b']}]",
            (),
            "--lora-modules /data/b is a path of this machine",
        ),
        (
            "model: org/model\nworkers: [{lora_enabled: true, lora_modules: 'b=file:///data/b'}]",
            (),
            "--lora-modules /data/b is a path of this machine",
        ),
        (
            "model: org/model\nworkers: [{args: [--tokenizer, /data/tokenizer]}]",
            (),
            "--tokenizer /data/tokenizer is a path of this machine",
        ),
        (
            "model: org/model\nworkers: [{dump_config_to: /var/config.json}]",
            (),
            "--dump-config-to /var/config.json cannot be written in a container; leave it out",
        ),
        (
            "model: org/model\nworkers: [{role: encode, ec_storage_path: /data/ec}, {role: agg}]",
            (),
            "--ec-storage-path /data/ec cannot be written in a container",
        ),
        ("model: org/model\nworkers: [{role: prefill}]", (), "has prefill workers only"),
        (
            "model: org/model\nworkers: [{args: [-dp, 4, -dpl, 2, --data-parallel-address, 10.0.0.1]}]",
            (),
            "--data-parallel-address 10.0.0.1: in a cluster pods have other addresses",
        ),
        (
            "model: org/model\nworkers: [{args: [-dp, 4, -dpl, 2, --data-parallel-hybrid-lb]}]",
            (),
            "--data-parallel-hybrid-lb makes each node a worker of its own",
        ),
        ("model: org/model\nworkers: [{headless: true}]", (), "a headless group belongs to a worker"),
        (
            "model: org/model\nworkers: [{args: [-tp, 16, --nnodes, 2]}]",
            ("--operator",),
            "worker spans 2 nodes: the operator would add flags",
        ),
        ("model: org/model\nfrontend: {port: 8080}", ("--operator",), "leads to 8000"),
        (
            "model: org/model\nworkers: [{event_plane: nats}]",
            (),
            "--event-plane nats needs a server; add --nats nats://HOST:4222",
        ),
        ("model: org/model\nfrontend: {port: 80}", (), "frontend: port 80: give one from 1024 on"),
        ("model: org/model\nfrontend: {port: 0}", (), "--port 0 does not choose a free port here; name one"),
        ("model: org/model", ("--max-model-len", "8"), "--max-model-len is not an option of export"),
        ("model: org/model\nworker: []", (), "did you mean 'workers'?"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    serve: str, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("serve.yaml").write_text(serve)
    assert said in refused(capsys, "k8s", "--config", "serve.yaml", "-o", "out", *argv)
    assert not Path("out").exists()


def test_compose_is_for_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text("model: org/model\nworkers: [{args: [-dp, 4, -dpl, 2]}]")
    said = refused(capsys, "compose", "--config", "serve.yaml", "-o", "out")
    assert "a worker over 2 nodes is for a cluster" in said


@pytest.mark.parametrize(
    "argv",
    [
        ("--operator",),
        ("--discovery", "kubernetes"),
        ("--frontends", "2"),
        ("--worker-memory-gb", "64"),
        ("--cache-claim", "weights"),
    ],
)
def test_what_compose_has_no_place_for_is_refused(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "compose", "--config", "serve.yaml", "-o", "out", *argv)
    assert f"{argv[0]} is for 'export k8s'; leave it out" in said


def test_the_environment_of_this_machine_is_not_that_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {
        "DYN_VLLM_MODEL": "org/other",
        "NATS_SERVER": "nats://localhost:4222",
        "ETCD_ENDPOINTS": "http://localhost:2379",
        "DYN_NAMESPACE": "mine",
    }
    assert run("k8s", "--config", "serve.yaml", "-o", "out") == 0
    monkeypatch.setattr("os.environ", local)
    assert run("k8s", "--config", "serve.yaml", "-o", "again") == 0
    for path in Path("out").iterdir():
        assert Path("again", path.name).read_text().replace("again", "out") == path.read_text()


def test_secret_in_the_environment_of_a_group_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(
        "model: org/model\nworkers:\n"
        "- env: {HF_TOKEN: h, AWS_SECRET_ACCESS_KEY: x, TOKENIZERS_PARALLELISM: 0}\n"
    )
    assert run("k8s", "--config", "serve.yaml", "-o", "out") == 0
    assert capsys.readouterr().err.splitlines() == [
        f"note: workers[0]: env: {name} is written in plain text; a Secret is a better place"
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    ]


def test_paths_that_containers_see_are_taken() -> None:
    Path("serve.yaml").write_text(
        "model: /models/base\nworkers:\n- lora_enabled: true\n  lora_modules: ['a=/models/a', 'b=s3://x/y']\n"
        "  dump_config_to: /tmp/config.json\n  args: [--tokenizer, org/name, --download-dir, /models/hub]\n"
    )
    assert run("k8s", "--config", "serve.yaml", "-o", "out") == 0


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_first_ports_are_those_of_every_container(kind: str) -> None:
    Path("serve.yaml").write_text(
        "model: org/model\nworkers: [{system_port: 9000, card_port: 9100, kv_event_port: 20000, count: 2}]\n"
    )
    assert run(kind, "--config", "serve.yaml", "-o", "out") == 0
    written = "".join(path.read_text() for path in Path("out").iterdir())
    assert "--card-port=9100\n" in written
    assert "--kv-event-port=20000\n" in written
    assert "9101" not in written and "20001" not in written


def test_services_of_others_do_not_become_settings() -> None:
    assert run("k8s", "--config", "serve.yaml", "-o", "out") == 0
    found = [d for path in Path("out").iterdir() for d in yaml.safe_load_all(path.read_text())]
    pods = [document["spec"]["template"]["spec"] for document in found if document["kind"] == "Deployment"]
    assert [spec["enableServiceLinks"] for spec in pods] == [False, False]


def test_gpus_that_a_group_names_are_its_containers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(
        "model: org/model\nworkers:\n"
        "- env: {CUDA_VISIBLE_DEVICES: '2,3'}\n  args: [--tensor-parallel-size, 2]\n- count: 2\n"
    )
    assert run("compose", "--config", "serve.yaml", "-o", "out") == 0
    assert capsys.readouterr().err == ""
    services = yaml.safe_load(Path("out/compose.yaml").read_text())["services"]
    ids = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
        if name.startswith("worker-")
    ]
    assert ids == [["2", "3"], ["0"], ["1"]]


def test_unknown_kind_and_missing_file_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'helm' is not a kind of export; use k8s or compose" in refused(capsys, "helm")
    assert "--config FILE is missing" in refused(capsys, "k8s", "-o", "out")
    assert "cannot be read" in refused(capsys, "k8s", "--config", "gone.yaml", "-o", "out")


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "dynamo-vllm export k8s --config serve.yaml -o manifests" in capsys.readouterr().out


def test_settings_reach_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--name",
        "chat",
        "--kube-namespace",
        "models",
        "--image",
        "registry.example/x:1",
        "--frontends",
        "3",
    )
    more = ("--discovery", "etcd", "--etcd", "http://etcd:2379", "--nats", "nats://nats:4222")
    size = ("--device", "cpu", "--worker-cpus", "7", "--worker-memory-gb", "9", "--shm-gb", "2")
    claim = ("--cache-claim", "weights", "--hf-secret", "token")
    assert run("k8s", "--config", "serve.yaml", "-o", "out", *argv, *more, *size, *claim) == 0
    assert "next: kubectl apply -k out" in capsys.readouterr().out
    assert not Path("out/crd.yaml").exists()
    assert not Path("out/storage.yaml").exists()
    documents = [d for path in sorted(Path("out").iterdir()) for d in yaml.safe_load_all(path.read_text())]
    kinds = {(d["kind"], d["metadata"]["name"]): d for d in documents if "metadata" in d}
    assert not any(kind in ("Role", "RoleBinding") for kind, _ in kinds)
    assert ("Namespace", "models") in kinds
    assert all(
        d["metadata"]["namespace"] == "models" for (kind, _), d in kinds.items() if kind != "Namespace"
    )
    assert kinds["Deployment", "chat-frontend"]["spec"]["replicas"] == 3
    spec = kinds["Deployment", "chat-worker"]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["ETCD_ENDPOINTS"] == "http://etcd:2379"
    assert env["DYN_EVENT_PLANE"] == "nats"
    assert env["NATS_SERVER"] == "nats://nats:4222"
    assert container["image"] == "registry.example/x:1"
    assert container["resources"]["requests"] == {"cpu": "7", "memory": "9Gi"}
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "models" in volume["name"]
    ]
    assert claims == ["weights"]


# --- tiers of KV caches ---------------------------------------------------------------------------------

TIERS = "model: org/model\nkv_offload_gb: 128\nkv_offload_disk: /kv:1000\nworkers: [{count: 2}]\n"


def test_tiers_have_memory_and_a_volume_in_kubernetes() -> None:
    Path("serve.yaml").write_text(TIERS)
    assert run("k8s", "--config", "serve.yaml", "-o", "out") == 0
    deployment = next(
        d for d in yaml.safe_load_all(Path("out/worker.yaml").read_text()) if d["kind"] == "Deployment"
    )
    assert deployment["spec"]["replicas"] == 2
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {"--kv-offload-gb=64.0", "--kv-offload-disk=/kv:500"} <= set(container["args"])
    # 64 GB are 60 GiB, beside 8 of shared memory and 32 of memory for all else.
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "68Gi"}
    assert volumes["kv-disk"]["emptyDir"] == {"sizeLimit": "513Gi"}
    assert {"name": "kv-disk", "mountPath": "/kv"} in container["volumeMounts"]
    assert container["resources"]["limits"]["memory"] == "92Gi"
    assert container["resources"]["requests"]["memory"] == "92Gi"
    assert container["resources"]["requests"]["ephemeral-storage"] == "513Gi"


def test_tiers_have_shared_memory_of_the_operator() -> None:
    Path("serve.yaml").write_text(TIERS)
    assert run("k8s", "--operator", "--config", "serve.yaml", "-o", "out") == 0
    graph = yaml.safe_load(Path("out/graph.yaml").read_text())
    (worker,) = [part for part in graph["spec"]["components"] if part["type"] == "worker"]
    assert worker["sharedMemorySize"] == "68Gi"
    volumes = {volume["name"] for volume in worker["podTemplate"]["spec"]["volumes"]}
    assert "kv-disk" in volumes and "shm" not in volumes


def test_tiers_have_memory_and_a_volume_in_compose(capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(TIERS)
    assert run("compose", "--config", "serve.yaml", "-o", "out") == 0
    found = yaml.safe_load(Path("out/compose.yaml").read_text())
    for name in ("worker-1", "worker-2"):
        service = found["services"][name]
        assert service["shm_size"] == "68gb"
        assert f"kv-{name}:/kv" in service["volumes"] and f"kv-{name}" in found["volumes"]
        assert "--kv-offload-disk=/kv:500" in service["command"]
    Path("serve.yaml").write_text(TIERS.replace("/kv:", "/mnt/kv:"))
    assert "write it like /kv:500" in refused(capsys, "compose", "--config", "serve.yaml", "-o", "new")


@pytest.mark.parametrize("path", ["kv", "/tmp", "/models", "/kv/../etc"])
def test_tiers_on_a_disk_need_a_mount_of_their_own(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(TIERS.replace("/kv:", f"{path}:"))
    assert "name an absolute path of its own" in refused(capsys, "k8s", "--config", "serve.yaml", "-o", "out")


def test_worker_without_tiers_is_as_before() -> None:
    Path("serve.yaml").write_text("model: org/model\nworkers: [{connector: [kvbm], kv_offload_gb: 4}]\n")
    assert run("k8s", "--config", "serve.yaml", "-o", "out") == 0
    text = Path("out/worker.yaml").read_text()
    assert "sizeLimit: 8Gi" in text and "kv-disk" not in text and "ephemeral" not in text


def test_planes_of_the_file_reach_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.yaml").write_text(
        "model: org/model\nfrontend: {request_plane: nats, nats_server: 'nats://here:4222'}\n"
    )
    assert run("k8s", "--config", "serve.yaml", "-o", "out", "--nats", "nats://there:4222") == 0
    assert "nats_server nats://here:4222 is replaced" in capsys.readouterr().err
    for name in ("frontend", "worker"):
        written = Path(f"out/{name}.yaml").read_text()
        assert "name: DYN_REQUEST_PLANE\n          value: nats\n" in written
        assert "nats://there:4222" in written
        assert "--request-plane" not in written


def frontend_with_tls(*argv: str) -> dict[tuple[str, str], Any]:
    """Its container, and what watches it."""
    Path("serve.yaml").write_text(
        "model: org/model\nfrontend: {tls_cert_path: /models/c.pem, tls_key_path: /models/k.pem}\n"
    )
    assert run(*argv, "--config", "serve.yaml", "-o", "out") == 0
    found = [d for path in Path("out").iterdir() for d in yaml.safe_load_all(path.read_text())]
    for document in found:
        if argv[0] == "k8s" and document["kind"] != "Kustomization":
            validate(document)
    return {(d.get("kind"), d.get("metadata", {}).get("name")): d for d in found}


@pytest.mark.parametrize("more", [(), ("--operator",)])
def test_frontend_with_a_certificate_is_probed_over_tls(more: tuple[str, ...]) -> None:
    found = frontend_with_tls("k8s", *more)
    if more:
        pods = [one["podTemplate"] for one in found[KIND, "dynamo-vllm"]["spec"]["components"]]
    else:
        names = ("dynamo-vllm-frontend", "dynamo-vllm-worker")
        pods = [found["Deployment", name]["spec"]["template"] for name in names]
        (scraped,) = found["ServiceMonitor", "dynamo-vllm-frontend"]["spec"]["endpoints"]
        assert (scraped["scheme"], scraped["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    front, worker = (pod["spec"]["containers"][0] for pod in pods)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert front[probe]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in worker[probe]["httpGet"]


def test_frontend_with_a_certificate_is_healthy_in_compose(tmp_path: Path) -> None:
    (document,) = frontend_with_tls("compose").values()
    check = document["services"]["frontend"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    with live(certificate=make_certificate(tmp_path, "models.example")) as port:
        code = check[3].replace(":8000", f":{port}")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_files_can_be_read_by_others() -> None:
    assert run("compose", "--config", "serve.yaml", "-o", "out") == 0
    assert Path("out/compose.yaml").stat().st_mode & stat.S_IROTH
