"""`dynamo-vllm export` of a deployment with a gateway: its objects, who reaches what, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import manifests as read
from dynamo_vllm.cli import main
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import GatewayOptions

SERVE = "model: org/model\nfrontend: {port: 8443}\ngateway: {header_kb: 8}\n"
POSTGRES = (
    "model: org/model\ngateway: {database: 'postgresql://user:pass-word@db/x', api_key: [key-of-clients]}\n"
)
WITH_TLS = (
    "model: org/model\ngateway: {}\n"
    "frontend: {tls_cert_path: /models/c.pem, tls_key_path: /models/k.pem, drain_seconds: 90}\n"
)
Objects = dict[tuple[str, str], Any]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {})


def run(serve: str, *argv: str, kind: str = "k8s") -> int:
    Path("serve.yaml").write_text(serve)
    return main.run(["export", kind, "--config", "serve.yaml", "-o", "out", "--name", "chat", *argv])


def objects(serve: str, *argv: str) -> Objects:
    assert run(serve, *argv) == 0
    found = read.documents({path.name: path.read_text() for path in Path("out").iterdir()})
    for document in found:
        read.validate(document)
    return {(d["kind"], d.get("metadata", {}).get("name", "")): d for d in found}


def parts(found: Objects) -> tuple[Any, Any]:
    spec = found["Deployment", "chat-gateway"]["spec"]["template"]["spec"]
    (control,), (envoy,) = spec["initContainers"], spec["containers"]
    return control, envoy


def options_of(container: Any) -> GatewayOptions:
    env = read.environment(container)
    found, rest = build.parse(GatewayOptions, read.arguments(container, env)[1:], env, "gateway", "")
    assert not rest
    checks.check_gateway(found, elsewhere=True)
    return found


def names(container: Any) -> set[str]:
    return {item["name"] for item in container["env"]}


def mounts(container: Any) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


# --- the pod ----------------------------------------------------------------------------------------------


def test_both_parts_read_what_the_file_says() -> None:
    found = objects(SERVE)
    control, envoy = map(options_of, parts(found))
    assert (control.part, envoy.part) == ("control", "envoy")
    for one in (control, envoy):
        assert (one.header_kb, one.port) == (8, 8443)
        assert one.frontend == ("http://chat-frontend:8443",)
    service = found["Service", "chat-frontend"]["spec"]
    assert "type" not in service, "only the cluster reaches the frontend"
    assert service["ports"][0]["port"] == 8443


def test_parts_meet_in_memory_and_are_probed_at_their_own_ports() -> None:
    found = objects(SERVE)
    spec = found["Deployment", "chat-gateway"]["spec"]["template"]["spec"]
    (sockets,) = [volume for volume in spec["volumes"] if volume["name"] == "sockets"]
    assert sockets["emptyDir"]["medium"] == "Memory"
    for container in parts(found):
        options = options_of(container)
        assert options.gateway_dir == mounts(container)["sockets"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert (asked["path"], ports[asked["port"]]) == ("/live", options.status_port)


def test_control_app_outlives_envoy_and_a_key_from_the_secret_is_optional() -> None:
    """A sidecar starts first and ends last, so requests that Envoy still serves are booked."""
    control, envoy = parts(objects(SERVE))
    secret = {"name": "chat-secrets", "key": "VLLM_API_KEY", "optional": True}  # the file has none
    assert {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": secret}} in control["env"]
    assert control["restartPolicy"] == "Always"
    assert "lifecycle" not in control
    assert envoy["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"


def test_only_the_control_app_joins_the_discovery_and_knows_secrets() -> None:
    found = objects(POSTGRES)
    control, envoy = parts(found)
    frontend = found["Deployment", "chat-frontend"]["spec"]["template"]["spec"]
    gateway = found["Deployment", "chat-gateway"]["spec"]["template"]["spec"]
    for key in ("serviceAccountName", "automountServiceAccountToken", "securityContext"):
        assert gateway[key] == frontend[key]
    of_frontend = read.environment(frontend["containers"][0], POD_NAME="p")
    of_control = read.environment(control, POD_NAME="p")
    shared = {name for name in of_frontend if name.startswith(("DYN_", "POD_"))} - {"DYN_HTTP_HOST"}
    assert {name: of_control[name] for name in shared} == {name: of_frontend[name] for name in shared}
    assert names(envoy) == {"HOME"}
    labels = found["Service", "chat-gateway"]["metadata"]["labels"]
    assert labels["nvidia.com/dynamo-discovery-enabled"] == "true", "workers find it to report tokens"


def test_secrets_are_neither_arguments_nor_written(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(POSTGRES)
    control, _ = parts(found)
    for name in ("VLLM_API_KEY", "DYN_VLLM_GATEWAY_DATABASE"):
        secret = {"name": "chat-secrets", "key": name}
        assert {"name": name, "valueFrom": {"secretKeyRef": secret}} in control["env"]
    assert run(POSTGRES, "--force", kind="compose") == 0
    environment = yaml.safe_load(Path("out/compose.yaml").read_text())["services"]["gateway"]["environment"]
    assert environment["DYN_VLLM_GATEWAY_DATABASE"] == "${DYN_VLLM_GATEWAY_DATABASE:?put it into .env}"
    said = capsys.readouterr()
    written = said.err + said.out + "".join(path.read_text() for path in Path("out").iterdir())
    assert "pass-word" not in written
    assert "key-of-clients" not in written
    assert "VLLM_API_KEY, DYN_VLLM_GATEWAY_DATABASE is not written to any file" in said.err


# --- databases --------------------------------------------------------------------------------------------


def test_sqlite_has_one_pod_at_a_time_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(SERVE)
    spec = found["Deployment", "chat-gateway"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert found["PersistentVolumeClaim", "chat-gateway"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    control, _ = parts(found)
    data = mounts(control)["data"]
    options = options_of(control)
    assert options.database == f"sqlite:///{data}/gateway.db"
    assert str(options.data_dir).startswith(f"{data}/")
    assert "there is one gateway: its database is SQLite, a file on the claim chat-gateway" in (
        capsys.readouterr().err
    )
    assert run(SERVE, "--gateways", "2", "--force") == 2
    assert "--gateways 2: SQLite is a file of one gateway" in capsys.readouterr().err


def test_gateways_on_postgresql_share_files(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(POSTGRES, "--gateways", "3", "--gateway-gb", "7", "--cache-class", "nfs")
    spec = found["Deployment", "chat-gateway"]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (3, "RollingUpdate")
    claim = found["PersistentVolumeClaim", "chat-gateway"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("7Gi", "nfs")
    assert "PostgreSQL needs an image with the extra postgres" in capsys.readouterr().err


# --- the way in -------------------------------------------------------------------------------------------


def test_without_tls_no_load_balancer_shows_keys_to_others(capsys: pytest.CaptureFixture[str]) -> None:
    service = objects(SERVE)["Service", "chat-gateway"]["spec"]
    assert service["type"] == "ClusterIP"
    assert "keys would travel in plain text; add --gateway-tls-secret or --gateway-api" in (
        capsys.readouterr().err
    )


def test_certificate_of_a_secret_is_envoys_alone() -> None:
    found = objects(SERVE, "--gateway-tls-secret", "certificate")
    control, envoy = parts(found)
    service = found["Service", "chat-gateway"]["spec"]
    assert (service["type"], service["ports"][0]["port"]) == ("LoadBalancer", 443)
    options = options_of(envoy)
    assert (options.tls_cert_path, options.tls_key_path) == ("/tls/tls.crt", "/tls/tls.key")
    assert mounts(envoy)["tls"] == "/tls"
    assert "tls" not in mounts(control)
    assert options_of(control).tls_cert_path is None
    volumes = found["Deployment", "chat-gateway"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "certificate"}} in volumes


def test_certificate_of_the_file_is_the_gateways_and_no_longer_the_frontends() -> None:
    found = objects(WITH_TLS)
    control, envoy = parts(found)
    assert options_of(envoy).tls_cert_path == "/models/c.pem"
    assert mounts(envoy)["models"] == "/models"
    assert found["Service", "chat-gateway"]["spec"]["type"] == "LoadBalancer"
    (frontend,) = found["Deployment", "chat-frontend"]["spec"]["template"]["spec"]["containers"]
    assert not any("tls" in word for word in frontend["args"])
    assert "scheme" not in frontend["livenessProbe"]["httpGet"]
    assert options_of(control).frontend == ("http://chat-frontend:8000",)
    grace = found["Deployment", "chat-gateway"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= 5 + 90 + 10


def test_route_of_an_existing_gateway_leads_to_the_service() -> None:
    found = objects(SERVE, "--gateway-api", "infra/public", "--hostname", "models.example.com")
    route = found["HTTPRoute", "chat-gateway"]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "infra"}]
    assert route["hostnames"] == ["models.example.com"]
    (rule,) = route["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}, "streams take long"
    service = found["Service", "chat-gateway"]["spec"]
    assert service["type"] == "ClusterIP"
    assert rule["backendRefs"] == [{"name": "chat-gateway", "port": service["ports"][0]["port"]}]
    assert options_of(parts(found)[1]).trusted_proxies == 1
    short = objects(SERVE, "--gateway-api", "public", "--force")["HTTPRoute", "chat-gateway"]["spec"]
    assert short["parentRefs"] == [{"name": "public"}]
    assert "hostnames" not in short


# --- who reaches the frontend -----------------------------------------------------------------------------


def may_reach(policy: Any, labels: dict[str, str], port: int) -> bool:
    """As Kubernetes decides for a pod of the same namespace; one of any namespace is also there."""
    for rule in policy["spec"]["ingress"]:
        fits = any(source["podSelector"]["matchLabels"].items() <= labels.items() for source in rule["from"])
        within = any(one["port"] <= port <= one.get("endPort", one["port"]) for one in rule["ports"])
        if fits and within:
            return True
    return False


def test_only_gateways_reach_the_frontends_http_port() -> None:
    found = objects(SERVE)
    policy = found["NetworkPolicy", "chat-frontend"]
    pods = {
        name: document["spec"]["template"]["metadata"]["labels"]
        for (kind, name), document in found.items()
        if kind == "Deployment"
    }
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pods["chat-frontend"].items()
    assert not policy["spec"]["podSelector"]["matchLabels"].items() <= pods["chat-gateway"].items()
    assert may_reach(policy, pods["chat-gateway"], 8443)
    assert not may_reach(policy, pods["chat-worker"], 8443)
    assert not may_reach(policy, {"app": "other"}, 8443)
    for port in (8442, 8444, 40000):
        assert may_reach(policy, pods["chat-worker"], port), "answers come from workers"
        assert not may_reach(policy, {"app": "other"}, port)
    assert ("NetworkPolicy", "chat-frontend-metrics") in found
    applied = yaml.safe_load(Path("out/kustomization.yaml").read_text())["resources"]
    assert "gateway.yaml" in applied
    assert "monitoring.yaml" not in applied, "Prometheus is let in with its monitors only"


# --- workers, hosts, refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_engines_take_requests_by_priority_behind_a_gateway(kind: str) -> None:
    serve = "model: org/model\nworkers: [{}, {component: b, args: [--scheduling-policy, fcfs]}]\n"
    assert run(serve, "--gateway", kind=kind) == 0
    written = "".join(path.read_text() for path in Path("out").iterdir())
    assert written.count("- --scheduling-policy\n") == 2
    assert written.count("- priority\n") == 1, "a policy of the file stays"
    assert run(serve, "--no-gateway", "--force", kind=kind) == 0


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_host_of_a_frontend_asks_for_no_gateway(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model: org/model\nfrontend: {host: 0.0.0.0}\n", kind=kind) == 0
    said = capsys.readouterr().err
    assert not Path("out/gateway.yaml").exists()
    assert ("port 8000 is open to other machines without a key" in said) == (kind == "compose")


def test_compose_publishes_envoy_alone() -> None:
    assert run("model: org/model\ngateway: {}\nfrontend: {host: 0.0.0.0}\n", kind="compose") == 0
    services = yaml.safe_load(Path("out/compose.yaml").read_text())["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"envoy"}
    assert services["envoy"]["ports"] == ["8000:8000"]
    shared = [{word.split(":")[0] for word in services[name]["volumes"]} for name in ("gateway", "envoy")]
    assert set.intersection(*shared) == {"gateway-sockets"}
    assert "VLLM_API_KEY" not in services["envoy"]["environment"]
    worker = services["worker-1"]
    assert f"usage:{worker['environment']['DYN_VLLM_USAGE_DIR']}" in worker["volumes"]
    assert list(services["envoy"]["depends_on"]) == ["gateway"], "it stops before the control app"


def test_paths_of_this_machine_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    local = "{data_dir: /var/here, envoy_path: /opt/envoy, database: 'sqlite:////var/here.db'}"
    assert run(f"model: org/model\ngateway: {local}\n") == 0
    said = capsys.readouterr().err
    for name in ("data_dir /var/here", "envoy_path /opt/envoy", "database sqlite:////var/here.db"):
        assert f"gateway: {name} is left out" in said
    written = Path("out/gateway.yaml").read_text()
    assert "/var/here" not in written and "/opt/envoy" not in written


@pytest.mark.parametrize(
    ("serve", "argv", "said"),
    [
        ("model: org/model", ("--gateways", "2"), "--gateways needs a gateway; add --gateway"),
        (SERVE, ("--no-gateway", "--gateway-api", "x"), "--gateway-api needs a gateway"),
        (SERVE, ("--operator",), "leave --operator out, or add --no-gateway"),
        (SERVE, ("--gateway-api", "x", "--gateway-tls-secret", "y"), "ends TLS itself"),
        (SERVE, ("--hostname", "a.example"), "--hostname a.example needs --gateway-api"),
        (SERVE, ("--gateway-api", "x", "--hostname", "A b"), "'A b' is not a hostname"),
        (SERVE, ("--gateway-api", "a/b/c"), "--gateway-api 'b/c' is not a valid Kubernetes name"),
        (SERVE, ("--gateway-tls-secret", "A"), "--gateway-tls-secret 'A' is not a valid Kubernetes name"),
        (SERVE, ("--gateways", "0"), "--gateways"),
        (SERVE.replace("8}", "9000}"), (), "--header-kb 9000 is more than Envoy takes"),
        (WITH_TLS, ("--gateway-api", "x"), "leave tls_cert_path and tls_key_path out of the file"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    serve: str, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(serve, *argv) == 2
    assert said in capsys.readouterr().err
    assert not Path("out").exists()
