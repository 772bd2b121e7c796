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
TIERS = "model: org/model\nkv_offload_gb: 128\nkv_offload_disk: /kv:1000\nworkers: [{count: 2}]\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {})
    Path("serve.yaml").write_text(SERVE)
    return tmp_path


def run(*argv: str) -> int:
    return main.run(["export", *argv])


def export(serve: str, *argv: str, kind: str = "k8s") -> None:
    Path("serve.yaml").write_text(serve)
    assert run(kind, "--config", "serve.yaml", "-o", "out", *argv) == 0


def written(folder: str = "out") -> str:
    return "".join(path.read_text() for path in sorted(Path(folder).iterdir()))


def documents() -> list[Any]:
    return [d for path in sorted(Path("out").iterdir()) for d in yaml.safe_load_all(path.read_text())]


def deployment(name: str) -> Any:
    (spec,) = [
        document["spec"]
        for document in documents()
        if document["kind"] == "Deployment" and document["metadata"]["name"] == name
    ]
    return spec


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


def test_folder_that_is_not_empty_needs_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("k8s", "--config", "serve.yaml", "-o", ".") == 0, "the file itself may lie there"
    assert Path("serve.yaml").read_text() == SERVE
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    assert "not empty (notes.txt)" in refused(capsys, "k8s", "--config", "serve.yaml", "-o", "out")
    export(SERVE, "--force")
    first = written()
    export(SERVE, "--force")
    assert written() == first and Path("out/notes.txt").read_text() == "mine"


def test_foreign_files_stay_even_with_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/frontend.yaml").write_text("kind: Mine\n")
    said = refused(capsys, "k8s", "--config", "serve.yaml", "-o", "out", "--force")
    assert "out/frontend.yaml was not made by export; move it" in said
    assert [path.name for path in Path("out").iterdir()] == ["frontend.yaml"]


def test_files_of_an_earlier_export_are_named_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    export("model: org/model\nworkers: [{role: prefill}, {role: decode}]\n")
    export(SERVE, "--force")
    assert "out/decode.yaml is from an earlier export and no longer used" in capsys.readouterr().err
    assert yaml_files.is_ours(Path("out/decode.yaml"))


def test_local_settings_are_replaced_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    export(
        "model: org/model\nfrontend: {discovery_backend: file, host: 127.0.0.1}\n"
        "workers:\n- {file_kv: /run/kv, system_port: 9000, admin_token: s3cret, "
        "env: {CUDA_VISIBLE_DEVICES: '3'}}\n"
    )
    said = capsys.readouterr().err
    for note in (
        "discovery_backend file is replaced: processes find each other by kubernetes",
        "file_kv /run/kv is replaced",
        "system_port 9000 is left out",
        "CUDA_VISIBLE_DEVICES of a group is left out",
        "DYN_VLLM_ADMIN_TOKEN is not written to any file; put it into the Secret dynamo-vllm-secrets before",
    ):
        assert note in said
    for local in ("s3cret", "/run/kv", "CUDA_VISIBLE_DEVICES"):
        assert local not in written()
    env = deployment("dynamo-vllm-worker")["template"]["spec"]["containers"][0]["env"]
    secret = {"name": "dynamo-vllm-secrets", "key": "DYN_VLLM_ADMIN_TOKEN"}
    assert {"name": "DYN_VLLM_ADMIN_TOKEN", "valueFrom": {"secretKeyRef": secret}} in env


LOCAL = "is a path of this machine"
NODES = "args: [-dp, 4, -dpl, 2"


@pytest.mark.parametrize(
    ("serve", "argv", "said"),
    [
        ("workers: [{}]", "", "the file names no model"),
        ("model: /data/model", "", f"--model /data/model {LOCAL}"),
        ("model: /models/../data", "", LOCAL),
        ("workers: [{custom_jinja_template: chat.jinja}]", "", f"--custom-jinja-template chat.jinja {LOCAL}"),
        (
            "frontend: {tls_cert_path: /etc/c.pem, tls_key_path: /etc/k.pem}",
            "",
            f"--tls-cert-path /etc/c.pem {LOCAL}",
        ),
        (
            "workers: [{lora_enabled: true, lora_modules: ['a=hf://x/y', 'b=/data/b']}]",
            "",
            f"--lora-modules /data/b {LOCAL}",
        ),
        (
            "workers: [{lora_enabled: true, lora_modules: 'b=file:///data/b'}]",
            "",
            f"--lora-modules /data/b {LOCAL}",
        ),
        ("workers: [{args: [--tokenizer, /data/tokenizer]}]", "", f"--tokenizer /data/tokenizer {LOCAL}"),
        (
            "workers: [{dump_config_to: /var/config.json}]",
            "",
            "--dump-config-to /var/config.json cannot be written in a container; leave it out",
        ),
        (
            "workers: [{role: encode, ec_storage_path: /data/ec}, {role: agg}]",
            "",
            "--ec-storage-path /data/ec cannot be written in a container",
        ),
        ("workers: [{role: prefill}]", "", "has prefill workers only"),
        (
            f"workers: [{{{NODES}, --data-parallel-address, 10.0.0.1]}}]",
            "",
            "--data-parallel-address 10.0.0.1: in a cluster pods have other addresses",
        ),
        (
            f"workers: [{{{NODES}, --data-parallel-hybrid-lb]}}]",
            "",
            "--data-parallel-hybrid-lb makes each node a worker of its own",
        ),
        ("workers: [{headless: true}]", "", "a headless group belongs to a worker"),
        (
            "workers: [{args: [-tp, 16, --nnodes, 2]}]",
            "--operator",
            "worker spans 2 nodes: the operator would add flags",
        ),
        ("frontend: {port: 8080}", "--operator", "leads to 8000"),
        (
            "workers: [{event_plane: nats}]",
            "",
            "--event-plane nats needs a server; add --nats nats://HOST:4222",
        ),
        ("frontend: {port: 80}", "", "frontend: port 80: give one from 1024 on"),
        ("frontend: {port: 0}", "", "--port 0 does not choose a free port here; name one"),
        ("", "--max-model-len 8", "--max-model-len is not an option of export"),
        ("worker: []", "", "did you mean 'workers'?"),
        (f"workers: [{{{NODES}]}}]", "compose", "a worker over 2 nodes is for a cluster"),
        *(
            ("", f"compose {flag}", f"{flag.split()[0]} is for 'export k8s'; leave it out")
            for flag in (
                "--operator",
                "--discovery kubernetes",
                "--frontends 2",
                "--worker-memory-gb 64",
                "--cache-claim weights",
            )
        ),
        *(
            (TIERS.replace("/kv:", f"{path}:"), "", "name an absolute path of its own")
            for path in ("kv", "/tmp", "/models", "/kv/../etc")
        ),
        (TIERS.replace("/kv:", "/mnt/kv:"), "compose", "write it like /kv:500"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    serve: str, argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    has_model = "model: " in serve or said == "the file names no model"
    Path("serve.yaml").write_text(serve if has_model else f"model: org/model\n{serve}")
    kind, *more = argv.split() if argv.startswith("compose") else ["k8s", *argv.split()]
    assert said in refused(capsys, kind, "--config", "serve.yaml", "-o", "out", *more)
    assert not Path("out").exists()


def test_the_environment_of_this_machine_is_not_that_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"DYN_VLLM_MODEL": "org/other", "DYN_NAMESPACE": "mine"}
    local |= {"NATS_SERVER": "nats://localhost:4222", "ETCD_ENDPOINTS": "http://localhost:2379"}
    export(SERVE, "--force")
    first = written()
    monkeypatch.setattr("os.environ", local)
    export(SERVE, "--force")
    assert written() == first


def test_secret_in_the_environment_of_a_group_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    export(
        "model: org/model\nworkers:\n"
        "- env: {HF_TOKEN: h, AWS_SECRET_ACCESS_KEY: x, TOKENIZERS_PARALLELISM: 0}\n"
    )
    assert capsys.readouterr().err.splitlines() == [
        f"note: workers[0]: env: {name} is written in plain text; a Secret is a better place"
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    ]


def test_paths_that_containers_see_are_taken() -> None:
    export(
        "model: /models/base\nworkers:\n- lora_enabled: true\n  lora_modules: ['a=/models/a', 'b=s3://x/y']\n"
        "  dump_config_to: /tmp/config.json\n  args: [--tokenizer, org/name, --download-dir, /models/hub]\n"
    )


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_first_ports_are_those_of_every_container(kind: str) -> None:
    ports = "{system_port: 9000, card_port: 9100, kv_event_port: 20000, count: 2}"
    export(f"model: org/model\nworkers: [{ports}]\n", kind=kind)
    assert "--card-port=9100\n" in written()
    assert "--kv-event-port=20000\n" in written()
    assert "9101" not in written() and "20001" not in written()


def test_gpus_that_a_group_names_are_its_containers(capsys: pytest.CaptureFixture[str]) -> None:
    group = "- env: {CUDA_VISIBLE_DEVICES: '2,3'}\n  args: [--tensor-parallel-size, 2]\n"
    export(f"model: org/model\nworkers:\n{group}- count: 2\n", kind="compose")
    assert capsys.readouterr().err == ""
    services = documents()[0]["services"]
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


def test_settings_reach_the_objects(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--name chat --kube-namespace models --image registry.example/x:1 --frontends 3 --discovery etcd "
        "--etcd http://etcd:2379 --nats nats://nats:4222 --device cpu --worker-cpus 7 --worker-memory-gb 9 "
        "--shm-gb 2 --cache-claim weights --hf-secret token"
    )
    export(SERVE, *flags.split())
    assert "next: kubectl apply -k out" in capsys.readouterr().out
    assert not Path("out/crd.yaml").exists()
    assert not Path("out/storage.yaml").exists()
    kinds = {(d["kind"], d["metadata"]["name"]): d for d in documents() if "metadata" in d}
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
    (models,) = [volume for volume in spec["volumes"] if "models" in volume["name"]]
    assert models["persistentVolumeClaim"]["claimName"] == "weights"


# --- tiers of KV caches ---------------------------------------------------------------------------------


def test_tiers_have_memory_and_a_volume_in_kubernetes() -> None:
    export(TIERS)
    workers = deployment("dynamo-vllm-worker")
    assert workers["replicas"] == 2
    spec = workers["template"]["spec"]
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
    export(TIERS, "--operator")
    graph = yaml.safe_load(Path("out/graph.yaml").read_text())
    (worker,) = [part for part in graph["spec"]["components"] if part["type"] == "worker"]
    assert worker["sharedMemorySize"] == "68Gi"
    volumes = {volume["name"] for volume in worker["podTemplate"]["spec"]["volumes"]}
    assert "kv-disk" in volumes and "shm" not in volumes


def test_tiers_have_memory_and_a_volume_in_compose() -> None:
    export(TIERS, kind="compose")
    (found,) = documents()
    for name in ("worker-1", "worker-2"):
        service = found["services"][name]
        assert service["shm_size"] == "68gb"
        assert f"kv-{name}:/kv" in service["volumes"] and f"kv-{name}" in found["volumes"]
        assert "--kv-offload-disk=/kv:500" in service["command"]


def test_worker_without_tiers_is_as_before() -> None:
    export("model: org/model\nworkers: [{connector: [kvbm], kv_offload_gb: 4}]\n")
    text = Path("out/worker.yaml").read_text()
    assert "sizeLimit: 8Gi" in text and "kv-disk" not in text and "ephemeral" not in text


def test_planes_of_the_file_reach_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    planes = "{request_plane: nats, nats_server: 'nats://here:4222'}"
    export(f"model: org/model\nfrontend: {planes}\n", "--nats", "nats://there:4222")
    assert "nats_server nats://here:4222 is replaced" in capsys.readouterr().err
    for name in ("frontend", "worker"):
        text = Path(f"out/{name}.yaml").read_text()
        assert "name: DYN_REQUEST_PLANE\n          value: nats\n" in text
        assert "nats://there:4222" in text
        assert "--request-plane" not in text


def frontend_with_tls(*argv: str, kind: str = "k8s") -> dict[tuple[str, str], Any]:
    """Its container, and what watches it."""
    paths = "{tls_cert_path: /models/c.pem, tls_key_path: /models/k.pem}"
    export(f"model: org/model\nfrontend: {paths}\n", *argv, kind=kind)
    for document in documents() if kind == "k8s" else ():
        if document["kind"] != "Kustomization":
            validate(document)
    return {(d.get("kind"), d.get("metadata", {}).get("name")): d for d in documents()}


@pytest.mark.parametrize("more", [(), ("--operator",)])
def test_frontend_with_a_certificate_is_probed_over_tls(more: tuple[str, ...]) -> None:
    found = frontend_with_tls(*more)
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
    (document,) = frontend_with_tls(kind="compose").values()
    check = document["services"]["frontend"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    with live(certificate=make_certificate(tmp_path, "models.example")) as port:
        code = check[3].replace(":8000", f":{port}")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_files_can_be_read_by_others() -> None:
    export(SERVE, kind="compose")
    assert Path("out/compose.yaml").stat().st_mode & stat.S_IROTH
