"""What `serve` decides before and while processes run: the plan, restarts, verdicts, what a person sees."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_vllm.cli.start import serve
from dynamo_vllm.config.rules import flags, kv_tiers
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.supervise import run_folder
from dynamo_vllm.supervise.limits import Pulse, Restarts, SupervisorLimits
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning.process import COMMAND, Plan
from dynamo_vllm.supervise.process import logs
from dynamo_vllm.supervise.process.ended import describe
from dynamo_vllm.supervise.screen import Screen

FAKE = {"engine": "fake"}
DISCOVERY = Path("/run/x/discovery")


def made(words: str, env: dict[str, str] | None = None) -> Plan:
    environment = env or {}
    _, wanted = serve.understand(words.split(), environment)
    return plan.make(wanted, environment, DISCOVERY)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """A `serve` file with this content, as words of a command."""

    def write(content: str) -> str:
        (tmp_path / "serve.yaml").write_text(content)
        return f"--config {tmp_path / 'serve.yaml'}"

    return write


def refusal(words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        made(words)
    return str(refused.value)


def words_of(found: Plan, name: str) -> list[str]:
    (process,) = [process for process in found.processes if process.name == name]
    return list(process.argv[len(COMMAND) :])


@pytest.fixture(autouse=True)
def nixl_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "is_installed", lambda package: package == "nixl")


# --- the plan -------------------------------------------------------------------------------------------


def test_flags_reach_the_processes_they_concern() -> None:
    found = made("m --port 80 --router random --max-model-len 99 --component c -tp 2")
    assert words_of(found, "frontend") == ["frontend", "--port=80", "--router=random"]
    assert words_of(found, "worker-1") == [
        "worker",
        "--model=m",
        "--component=c",
        "--max-model-len",
        "99",
        "-tp",
        "2",
    ]
    assert found.url == "http://127.0.0.1:80"
    both = made("m --namespace n --drain-seconds 7 --no-kv-events")
    frontend = "frontend --namespace=n --no-use-kv-events --drain-seconds=7.0"
    assert words_of(both, "frontend") == frontend.split()
    worker = "worker --namespace=n --model=m --no-kv-events --drain-seconds=7.0"
    assert words_of(both, "worker-1") == worker.split()
    assert [process.drain_seconds for process in both.processes] == [7.0, 7.0]


def test_environment_is_one_machine_without_services() -> None:
    env = made("m", env={"PATH": "/bin", "DYN_EVENT_PLANE": "nats", "DYN_SYSTEM_PORT": ""}).processes[0].env
    assert env["DYN_DISCOVERY_BACKEND"] == "file"
    assert env["DYN_FILE_KV"] == str(DISCOVERY)
    assert env["DYN_VLLM_BIND_HOST"] == "127.0.0.1"
    assert env["DYN_EVENT_PLANE"] == "nats"  # the user's own
    assert env["PATH"] == "/bin"
    assert "DYN_SYSTEM_PORT" not in env


def test_groups_become_named_workers_with_their_environment() -> None:
    wanted = Topology(
        model="m", workers=(WorkerGroup(2, FAKE), WorkerGroup(1, {**FAKE, "model": "n"}, env={"A": "1"}))
    )
    found = plan.make(wanted, {"A": "0"}, DISCOVERY)
    assert [process.name for process in found.processes] == ["frontend", "worker-1", "worker-2", "worker-3"]
    assert [worker.env["A"] for worker in found.workers] == ["0", "0", "1"]
    assert found.models == ("m", "n")


def test_worker_gets_two_ports_of_its_own_at_each_start() -> None:
    (worker,) = made("m").workers
    assert (worker.port, worker.card_port) == (None, None)
    told = worker.command(1234, 1235)[len(worker.argv) :]
    assert told == ["--system-port", "1234", "--card-port", "1235"]
    assert worker.health_url(1234) == "http://127.0.0.1:1234/live", "where one that sleeps is well"


def test_named_ports_count_up_over_workers_and_leave_room_for_the_ranks() -> None:
    by_variable = made("m --workers 2", env={"DYN_SYSTEM_PORT": "9000"})
    found = made("m --workers 2 --system-port 9000 --card-port 9100")
    for each in (by_variable, found):
        assert [worker.port for worker in each.workers] == [9000, 9001]
        assert "--system-port=9000" not in words_of(each, "frontend")
    assert [worker.card_port for worker in found.workers] == [9100, 9101]
    assert found.named_ports == {8000, 9000, 9001, 9100, 9101}
    ranks = made("m --workers 2 --kv-event-port 20000 --data-parallel-size 2").workers
    assert [worker.argv[-1] for worker in ranks] == ["--kv-event-port=20000", "--kv-event-port=20002"]
    all_roles = made(f"{PAIR} --side-channel-port 5600 -dp 2 -tp 4").workers
    assert [worker.argv[-1].rpartition("=")[2] for worker in all_roles] == ["5600", "5602", "5604"]


@pytest.mark.parametrize("words", ["--omni m", "m --omni", "--omni --model m"])
def test_the_model_may_follow_the_switch_for_pipelines(words: str) -> None:
    options, wanted = serve.understand(words.split(), {})
    assert options.model == "m"
    assert wanted.workers[0].options["omni"] is True


PAIR = "m --prefill 1 --decode 2"
TIERS = "m --engine fake --kv-offload-gb 1"
ENCODE = "m --engine fake --encode 1"
PORTS = f"{PAIR} --side-channel-port 5600"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("m --model n", "given twice"),
        ("--omni m --model n", "given twice, m and"),
        ("--port 80 m", "'m' is not a flag"),
        ("m --connector quux", "--connector 'quux' is unknown"),
        ("m --engine fake --enforce-eager", "is a flag of vLLM"),
        ("m --router best", "--router='best' is unknown"),
        ("m --config /no/such.yaml", "cannot be read"),
        (f"{TIERS} --connector none", "no worker keeps KV caches"),
        (f"{TIERS} --disaggregation-mode pooling", "no worker keeps KV caches"),
        (f"{PAIR} --component c", "workers of m would both be at dynamo.c.generate; leave --component"),
        (f"{PAIR} --endpoint dyn://dynamo.b.c", "would both be at dynamo.b.c"),
        (f"{PAIR} --is-prefill-worker", "the role of each worker; leave --is-prefill-worker out"),
        (f"{PAIR} --enable-multimodal --multimodal-decode-worker", "leave --multimodal-decode-worker out"),
        (f"{ENCODE} --disaggregation-mode agg", "--encode 1 already sets the role of each worker"),
        (f"{ENCODE} --multimodal-encode-worker", "leave --multimodal-encode-worker out"),
        (f"{ENCODE} --component c", "would both be at dynamo.c.generate"),
        (f"{PORTS} --port 5601", "--side-channel-port 5600: 5601 for decode-1 is taken by --port; name"),
        (f"{PORTS} --kv-event-port 5600", "5600 for prefill-1 is taken by --kv-event-port of prefill-1"),
        (f"{PORTS} --side-channel-port 65534", "-port 65534: 65536 for decode-2 is not a port"),
        (
            "m --workers 2 --system-port 9000 --card-port 9001",
            "9001 for worker-2 is taken by --card-port of worker-1",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(words: str, message: str) -> None:
    assert message in refusal(words)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("model: [", "", "serve.yaml is not YAML"),
        ("model: m\nworkers:\n- {count: 1, count: 2}", "", ":3: 'count' is given twice; keep one"),
        ("model: m\nworkers: [{role: encode, engine: fake}]", "", "m has encode workers only"),
        ("model: m\nworkers: [{role: encode}]", "--encode 1", "--encode 1: the file already has encode"),
        (
            "model: m\nworkers: [{engine: fake, enable-multimodal: true, media-hosts: [a.example]}]",
            "",
            "the frontend, which fetches images too, has none",
        ),
    ],
)
def test_bad_file_is_refused(content: str, words: str, message: str, written: Callable[[str], str]) -> None:
    assert message in refusal(f"{written(content)} {words}")


def test_file_gives_what_the_command_line_leaves_open(written: Callable[[str], str]) -> None:
    file = written(
        "model: m\nfrontend: {port: 81, host: 0.0.0.0}\nworkers: [{count: 2, args: [--dtype, float32]}]\n"
    )
    found = made(f"{file} --port 82")
    assert (found.host, found.port, found.url) == ("0.0.0.0", 82, "http://127.0.0.1:82")
    assert words_of(found, "worker-2") == ["worker", "--model=m", "--dtype", "float32"]


# --- prefill and decode ---------------------------------------------------------------------------------


def test_prefill_and_decode_workers_have_their_role_and_nixl(written: Callable[[str], str]) -> None:
    found = made(f"{PAIR} --max-model-len 99")
    roles = [("prefill-1", "prefill"), ("decode-1", "decode"), ("decode-2", "decode")]
    assert [(worker.name, worker.role) for worker in found.workers] == roles
    for worker in found.workers:
        words = f"worker --model=m --disaggregation-mode={worker.role} --connector nixl --max-model-len 99"
        assert words_of(found, worker.name) == words.split()
    by_file = made(written("model: m\nworkers: [{role: prefill}, {role: decode, count: 2}]\n"))
    assert [(worker.name, worker.role) for worker in by_file.workers] == roles
    assert all("nixl" in worker.argv for worker in by_file.workers)
    assert "--connector" not in made("m").workers[0].argv


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--connector nixl kvbm --engine fake", {}),
        ("--engine fake", {"DYN_CONNECTOR": "kvbm"}),
        ('--kv-transfer-config {"kv_connector":"Mine"}', {}),
    ],
)
def test_connector_of_the_user_stands(words: str, env: dict[str, str]) -> None:
    for worker in made(f"{PAIR} {words}", env=env).workers:
        assert [*worker.argv].count("--connector") == words.count("--connector")
        assert worker.env.get("DYN_CONNECTOR") == env.get("DYN_CONNECTOR")


def test_environment_numbers_the_workers_unless_a_file_does(written: Callable[[str], str]) -> None:
    env = {"DYN_VLLM_PREFILL_WORKERS": "1", "DYN_VLLM_DECODE_WORKERS": "1"}
    assert [worker.role for worker in made("m", env=env).workers] == ["prefill", "decode"]
    file = written("model: m\nworkers: [{count: 2}]\n")
    for counts in (env, {"DYN_VLLM_WORKERS": "5"}):
        assert len(made(file, env=counts).workers) == 2


@pytest.mark.parametrize(
    ("words", "publishes"),
    [
        ("", []),
        ("--local-prefill-tokens 64", ["decode-1", "decode-2"]),
        ("--local-prefill-tokens 64 --no-kv-events", []),
        ("--local-prefill-tokens 64 --kv-events-config {}", []),
    ],
)
def test_decode_workers_publish_their_cache_where_the_router_asks_for_it(
    words: str, publishes: list[str]
) -> None:
    found = made(f"{PAIR} {words}")
    assert [worker.name for worker in found.workers if "--kv-events" in worker.argv] == publishes


# --- tiers of KV caches ---------------------------------------------------------------------------------


def tiers(words: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """What each worker is told of its tiers."""
    found = made(f"{words} --engine fake", env=env)
    for worker in found.workers:
        assert not {"DYN_VLLM_KV_OFFLOAD_GB", "DYN_VLLM_KV_OFFLOAD_DISK"} & worker.env.keys()
    told = ("--kv-offload", "--connector", "nixl", "offload")
    return {
        worker.name: " ".join(word for word in words_of(found, worker.name) if word.startswith(told))
        for worker in found.workers
    }


SIZES = "--kv-offload-gb 12 --kv-offload-disk /kv:90"


def test_tiers_of_serve_are_shared_out_evenly_and_that_is_said(written: Callable[[str], str]) -> None:
    each = "--kv-offload-gb=4.0 --kv-offload-disk=/kv:30"
    assert tiers(f"m --workers 3 {SIZES}") == {f"worker-{number}": each for number in (1, 2, 3)}
    assert tiers(f"m {SIZES}") == {"worker-1": "--kv-offload-gb=12.0 --kv-offload-disk=/kv:90"}
    env = {"DYN_VLLM_KV_OFFLOAD_GB": "12", "DYN_VLLM_KV_OFFLOAD_DISK": "/kv:90"}
    each = "--kv-offload-gb=6.0 --kv-offload-disk=/kv:45"
    assert tiers("m --workers 2", env=env) == {"worker-1": each, "worker-2": each}
    said = made(f"m --workers 2 --engine fake {SIZES}").said
    assert said is not None
    assert "--kv-offload-gb 12.0 is 6.0 for each of 2 workers" in said
    assert "--kv-offload-disk /kv:90 is /kv:45 for each of 2 workers" in said
    assert made(f"m --engine fake {SIZES}").said is None
    models = written("kv_offload_disk: /kv:90\nworkers: [{model: a}, {model: b, count: 2}]\n")
    assert set(tiers(models).values()) == {"--kv-offload-disk=/kv:30"}


def test_prefill_workers_keep_caches_and_decode_workers_only_what_they_compute() -> None:
    pair = "m --prefill 2 --decode 1 --kv-offload-gb 12"
    kept = "--connector nixl offload --kv-offload-gb=6.0"
    assert tiers(pair) == {"prefill-1": kept, "prefill-2": kept, "decode-1": "--connector nixl"}
    all_three = {"--connector nixl offload --kv-offload-gb=4.0"}
    assert set(tiers(f"{pair} --local-prefill-tokens 64").values()) == all_three
    named = {"--connector offload nixl --kv-offload-gb=4.0"}
    assert set(tiers(f"{pair} --connector offload nixl").values()) == named
    encoders = tiers("m --encode 1 --enable-multimodal --kv-offload-gb 12 --connector offload")
    assert encoders == {"worker-1": "--connector offload --kv-offload-gb=12.0", "encode-1": ""}


def test_own_tier_of_a_group_is_that_of_each_of_its_workers(written: Callable[[str], str]) -> None:
    file = written(
        "model: m\nkv-offload-gb: 12\nworkers:\n  - {count: 2, kv_offload_gb: 1}\n"
        "  - {count: 2, component: c}\n  - {component: d, connector: [none]}\n"
    )
    sizes = [told.rpartition("gb=")[2] for told in tiers(file).values()]
    assert sizes == ["1.0", "1.0", "6.0", "6.0", "--connector"]
    over = [told.rpartition("gb=")[2] for told in tiers(f"{file} --kv-offload-gb 8").values()]
    assert over == ["2.0"] * 4 + ["--connector"]


def test_tiers_that_fit_only_one_by_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], str]
) -> None:
    file = written("model: m\nworkers: [{count: 4, kv_offload_gb: 0.3}]\n")
    monkeypatch.setattr(kv_tiers, "shared_memory_bytes", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"1.2 GB of host memory .* all workers .*--shm-size=2g"):
        made(file)
    monkeypatch.setattr(kv_tiers, "shared_memory_bytes", lambda: 2 * 10**9)
    made(file)
    whole = shutil.disk_usage("/tmp").total // 10**9
    words = f"m --workers 2 --kv-offload-gb 0.2 --kv-offload-disk /tmp/kv:{2 * whole}"
    assert f"/tmp/kv:{2 * whole} does not fit" in refusal(words)


# --- encoders -------------------------------------------------------------------------------------------


def asks(found: Plan, name: str) -> bool:
    return "--route-to-encoder" in words_of(found, name)


def test_encoders_and_those_who_ask_them_share_a_folder(written: Callable[[str], str]) -> None:
    found = made("m --encode 2 --engine fake")
    roles = [("worker-1", "agg"), ("encode-1", "encode"), ("encode-2", "encode")]
    assert [(worker.name, worker.role) for worker in found.workers] == roles
    assert all("--enable-multimodal" in words_of(found, worker.name) for worker in found.workers)
    assert asks(found, "worker-1") and not asks(found, "encode-1")
    file = written(
        "model: m\nworkers: [{args: [--ec-transfer-config.ec_role, ec_consumer]}, "
        "{args: [--ec-transfer-config.ec_role, ec_producer]}]\n"
    )
    by_flag = made(file)
    assert [(worker.name, worker.role) for worker in by_flag.workers] == roles[:2]
    for worker in (*found.workers, *by_flag.workers):
        assert f"--ec-storage-path={DISCOVERY.parent / 'embeddings'}" in worker.argv
    assert "--encode 1: the file already has encode workers" in refusal(f"{file} --encode 1")


def test_of_prefill_and_decode_workers_the_first_asks(written: Callable[[str], str]) -> None:
    found = made(f"{PAIR} --encode 1 --engine fake")
    assert [worker.name for worker in found.workers] == ["prefill-1", "decode-1", "decode-2", "encode-1"]
    assert [asks(found, worker.name) for worker in found.workers] == [True, False, False, False]
    assert not any("ec-storage-path" in word for word in words_of(found, "decode-1"))
    file = written(
        "model: m\nworkers:\n- {role: prefill, engine: fake}\n"
        "- {role: decode, engine: fake, route_to_encoder: true}\n- {role: encode, engine: fake}\n"
    )
    assert asks(made(file), "decode-1"), "what stands in the group itself is meant for it"


@pytest.mark.parametrize(
    "words",
    [
        "--ec-consumer-mode",
        "--ec-consumer-mode --ec-connector-backend ECExampleConnector",
        "--route-to-encoder --ec-storage-path /e",
        "--ec-storage-path /e",
        '--multimodal-worker --ec-extra-config {"shared_storage_path":"/e"}',
        "--encoder-transfer nixl",
    ],
)
def test_flags_about_encoders_do_not_reach_decode_workers(words: str) -> None:
    found = made(f"{PAIR} --encode 1 --engine fake {words}")
    options = {worker.name: plan.parse(words_of(found, worker.name)).options for worker in found.workers}
    assert [name for name, each in options.items() if each.asks_encoders] == ["prefill-1"]
    flags = {word for word in words.split() if word.startswith("--")}
    assert flags <= names_of(found, "prefill-1") and not flags & names_of(found, "decode-2")
    assert options["decode-1"].enable_multimodal


def names_of(found: Plan, name: str) -> set[str]:
    return {word.partition("=")[0] for word in words_of(found, name)}


def test_flags_that_an_encoder_cannot_use_reach_the_others() -> None:
    found = made("m --encode 1 --ec-consumer-mode --connector nixl --ec-storage-path /e")
    assert {"--ec-consumer-mode", "--connector"} <= set(words_of(found, "worker-1"))
    assert not {"--ec-consumer-mode", "--connector"} & set(words_of(found, "encode-1"))
    assert "--ec-storage-path=/e" in words_of(found, "encode-1")


def test_hosts_for_pictures_are_the_frontends_too(written: Callable[[str], str]) -> None:
    found = made("m --engine fake --enable-multimodal --media-hosts a.example b.example")
    for name in ("frontend", "worker-1"):
        assert {"a.example", "b.example"} <= set(words_of(found, name))
    file = written("model: m\nworkers: [{engine: fake, enable-multimodal: true, media-hosts: [a.example]}]\n")
    made(f"{file} --media-hosts a.example")


def addressed(*groups: WorkerGroup, env: dict[str, str] | None = None) -> list[str]:
    """The components that groups of workers are told to take; - for the role's own."""
    found = plan.make(Topology(workers=groups), env or {}, DISCOVERY)
    named = ([word for word in worker.argv if word.startswith("--component=")] for worker in found.workers)
    return [words[0].removeprefix("--component=") if words else "-" for words in named]


def of_model(model: str, role: str = "agg", **options: str) -> WorkerGroup:
    return WorkerGroup(options={"model": model, "disaggregation_mode": role, **options})


def test_every_model_has_an_address_of_its_own() -> None:
    assert addressed(of_model("a"), of_model("b"), of_model("c"), of_model("a"), of_model("b")) == [
        "-", "backend-2", "backend-3", "-", "backend-2",
    ]  # fmt: skip
    pairs = [of_model(model, role) for model in ("a", "b") for role in ("prefill", "decode")]
    assert addressed(*pairs) == ["-", "-", "prefill-2", "backend-2"]
    assert addressed(of_model("a"), of_model("b", component="mine")) == ["-", "mine"]


def test_worker_that_the_frontend_would_not_see_is_refused() -> None:
    words = "m --engine fake --endpoint dyn://ours.b.c"
    assert "in the namespace ours and the frontend in dynamo" in refusal(words)
    assert "--namespace ours" in refusal(words)
    for seen in ("--namespace ours", "--namespace-prefix our"):
        assert len(made(f"{words} {seen}").workers) == 1


@pytest.mark.parametrize("env", [{"DYN_COMPONENT": "mine"}, {"DYN_ENDPOINT": "dyn://dynamo.mine.generate"}])
def test_two_models_at_an_address_the_user_named_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"b and a would both be at dynamo\.mine\.generate; leave --component"
    ):
        addressed(of_model("a"), of_model("b"), env=env)


def test_hub_ids_are_told_from_paths() -> None:
    assert all(map(serve.looks_like_a_path, ("/a", "./a", "a/b/c")))
    assert not any(map(serve.looks_like_a_path, ("a/b", "a")))


# --- restarts and verdicts ------------------------------------------------------------------------------


def test_pauses_double_up_to_a_limit_and_end() -> None:
    restarts = Restarts(SupervisorLimits(restarts=7))
    assert [restarts.pause_after(1.0) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, None]


def test_long_healthy_process_begins_a_new_row() -> None:
    restarts = Restarts(SupervisorLimits(restarts=2))
    assert [restarts.pause_after(s) for s in (0, 0, 61, 0, 0)] == [0, 1, 0, 1, None]


def test_process_without_answer_is_hung_after_its_limit() -> None:
    pulse = Pulse(SupervisorLimits(hang_seconds=30), now=0)
    assert pulse.verdict(200, 10, 10) is None
    assert pulse.verdict(None, 12, 39) is None
    assert pulse.verdict(None, 39, 40) == "did not answer for 30 s"


def test_slow_answer_is_waited_for_as_long_as_a_process_may_be_silent() -> None:
    limits = SupervisorLimits(hang_seconds=30, answer_seconds=5)
    pulse = Pulse(limits, now=0)
    assert pulse.patience(2) == 28
    assert pulse.verdict(200, 2, 29) is None
    assert pulse.patience(31) == 28
    assert pulse.patience(58) == limits.answer_seconds


def test_process_is_asked_again_after_a_pause_of_the_whole_machine() -> None:
    pulse = Pulse(SupervisorLimits(hang_seconds=30, answer_seconds=5), now=0)
    assert pulse.verdict(None, 2, 300) is None, "nobody ran, the supervisor neither"
    assert pulse.patience(302) == 5
    assert pulse.verdict(None, 302, 307) == "did not answer for 307 s"


def test_process_that_is_not_ready_gets_longer() -> None:
    pulse = Pulse(SupervisorLimits(unwell_seconds=120), now=0)
    assert pulse.verdict(503, 119, 119) is None
    assert pulse.verdict(200, 120, 120) is None
    assert pulse.verdict(503, 240, 240) is None
    assert pulse.verdict(503, 241, 241) == "was not ready for 121 s"


def test_missed_look_does_not_make_a_process_well() -> None:
    pulse = Pulse(SupervisorLimits(hang_seconds=30, unwell_seconds=120), now=0)
    told = ((503, 100), (None, 110), (503, 120))
    assert [pulse.verdict(status, now, now) for status, now in told] == [None] * 3
    assert pulse.verdict(503, 121, 121) == "was not ready for 121 s"


def test_exit_statuses_are_said_in_words() -> None:
    assert [describe(code) for code in (1, 2, 3, -9)] == [
        "exited with code 1",
        "exited with code 2 (bad settings)",
        "exited with code 3 (the engine died)",
        "was killed by SIGKILL",
    ]


# --- what a person sees ---------------------------------------------------------------------------------


def test_last_error_line_is_the_reason() -> None:
    assert logs.error_line("x\nerror: first\nerror: second\nbye\n") == "second"
    assert logs.error_line("an error: no\n") is None


def test_last_lines_leave_out_what_tells_nothing() -> None:
    text = (
        "2026-11-15T05:15:28.434Z  INFO dynamo_vllm.serving.lifecycle.progress: loading (0.0 s)\n"
        "(EngineCore pid=7) INFO 11-15 05:15:28 [core.py:1] Using a layout\n"
        "(EngineCore pid=7) Loading shards:   0% | 0/1 [00:00<?, ?it/s]\n"
        "\x1b[36m(EngineCore pid=7)\x1b[0m ERROR 11-15 05:15:28 [a:1] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 11-15 05:15:28 [core.py:1]   File "core.py", line 1, in run\n'
        "(EngineCore pid=7) ERROR 11-15 05:15:28 [core.py:1]     raise ValueError\n\n"
        "(EngineCore pid=7) ValueError: no memory\n"
        "ValueError: no memory\n"
        "error: vLLM did not start\n"
    )
    assert logs.last_lines(text) == ["ValueError: no memory"]
    assert logs.last_lines("2026-11-15T05:15:28.434Z  INFO x: loading\n") == [
        "2026-11-15T05:15:28.434Z  INFO x: loading"
    ]
    assert logs.last_lines("\n".join(map(str, range(99)))) == [str(n) for n in range(84, 99)]


def test_log_is_read_from_where_the_process_began(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\nafter\n")
    assert logs.read_from(log, 7) == "after\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_screen_writes_a_line_per_change_where_there_is_no_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err)
    screen.phase("worker-1", "starting")
    screen.phase("worker-1", "loading")
    screen.redraw()
    screen.announce("ready: here")
    screen.hint(["try: this"])
    assert [line.split(" ", 1)[1] for line in err.getvalue().splitlines()] == [
        "worker-1: starting (0.0 s)",
        "worker-1: loading (0.0 s)",
        " try: this",
    ]
    assert out.getvalue() == "ready: here\n"


def test_screen_redraws_its_rows_on_a_terminal() -> None:
    out, err = io.StringIO(), Terminal()
    screen = Screen(out, err)
    screen.phase("frontend", "starting")
    screen.phase("worker-1", "loading")
    assert err.getvalue().endswith(
        "\x1b[1A\x1b[2K  frontend  starting        0.0 s\n\x1b[2K  worker-1  loading         0.0 s\n"
    )
    screen.announce("ready: here")
    screen.say("later")
    assert err.getvalue().endswith(" later\n")


def test_screen_nobody_reads_does_not_end_the_run() -> None:
    closed = io.StringIO()
    screen = Screen(closed, closed)
    closed.close()
    screen.say("into the void")


# --- folders and ports ----------------------------------------------------------------------------------


def test_cache_folder_follows_the_environment() -> None:
    assert run_folder.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/dynamo-vllm")
    assert run_folder.cache_folder({"HOME": "/h"}) == Path("/h/.cache/dynamo-vllm")
    assert run_folder.choose(None, {"HOME": "/h"}).path.parent == Path("/h/.cache/dynamo-vllm/run")


def test_run_folder_has_fresh_discovery_and_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOOK_SECONDS", 0.05)  # nobody else looks at it
    folder = run_folder.choose(str(tmp_path), {"HOME": str(tmp_path / "home")})
    with folder.opened():  # of a serve that failed
        (folder.discovery / "stale").touch()
        (tmp_path / "embeddings").mkdir()
        folder.targets.touch()
    with folder.opened():
        assert not (tmp_path / "embeddings").exists() and not folder.targets.exists()
        assert list(folder.discovery.iterdir()) == []
        with pytest.raises(StartError, match="in use by another serve"), folder.opened():
            pass
    with folder.opened():
        folder.forget()
    assert not folder.discovery.exists()


@pytest.mark.parametrize("name", ["discovery", "embeddings", "prometheus.json", "serve.json"])
@pytest.mark.parametrize("was_used", [False, True], ids=["new", "after a clean stop"])
def test_folder_with_files_of_the_user_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str, was_used: bool
) -> None:
    folder = run_folder.choose(str(tmp_path / "project"), {"HOME": str(tmp_path / "home")})
    folder.path.mkdir()
    if was_used:
        with folder.opened():
            folder.note("http://127.0.0.1:8000")
            folder.forget()
    theirs = folder.path / name / "theirs.npy" if "." not in name else folder.path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("[]")
    before = sorted(folder.path.rglob("*"))
    for _ in range(2):  # the refusal leaves no mark either
        with pytest.raises(StartError, match=f"project has {name}, .*; choose a new"), folder.opened():
            pass
    assert sorted(folder.path.rglob("*")) == before


# --- memory ---------------------------------------------------------------------------------------------


def engines_told(found: Plan) -> list[str | None]:
    return [process.env.get("DYN_VLLM_ENGINES_HERE") for process in found.workers]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--workers 4", ["4"] * 4),
        ("--prefill 1 --decode 2", ["3"] * 3),
        ("--workers 2 -dp 2", ["4", "4"]),
        ("-tp 2", ["2"]),
        ("", [None]),
        ("--encode 1 --workers 1", ["2", "2"]),  # an encoder takes cores too
        ("--workers 2 --engine fake", [None, None]),
    ],
)
def test_workers_are_told_how_many_engines_share_the_machine(words: str, told: list[str | None]) -> None:
    found = made(f"m {words}")
    assert engines_told(found) == told
    assert "DYN_VLLM_ENGINES_HERE" not in found.processes[0].env


def test_number_of_engines_the_user_says_stands() -> None:
    """Another `serve` on the same machine, for example."""
    assert engines_told(made("m --workers 2", env={"DYN_VLLM_ENGINES_HERE": "8"})) == ["8", "8"]
    assert "--engines-here=8" in words_of(made("m --workers 2 --engines-here 8"), "worker-2")


# --- GPUs -----------------------------------------------------------------------------------------------


def gpus_of(wanted: Topology, gpus: list[str]) -> list[str | None]:
    made = plan.make(wanted, {}, DISCOVERY, gpus)
    return [process.env.get("CUDA_VISIBLE_DEVICES") for process in made.workers]


def several(count: int, words: str = "", gpus: str = "") -> Topology:
    """Workers of one group, which may name its GPUs."""
    group = WorkerGroup(count, args=tuple(words.split()), env={"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
    return Topology(model="org/model", workers=(group,))


SHARDS = "--tensor-parallel-size 4 --nnodes 2 --master-addr 10.0.0.1"


@pytest.mark.parametrize(
    ("wanted", "gpus", "found"),
    [
        (several(2), "012", ["0", "1"]),
        (several(2, "--tensor-parallel-size 2"), "4567", ["4,5", "6,7"]),
        (several(2, SHARDS), "0123", ["0,1", "2,3"]),
        (several(2, "-dp 4 -dpl 1 --data-parallel-hybrid-lb"), "01", ["0", "1"]),
        (several(1), "01", [None]),
        (several(2, "--gpu-memory-utilization 0.5", gpus="0"), "01", ["0", "0"]),
        (several(2, "--gpu-memory-utilization 0.45", gpus="1"), "01", ["1", "1"]),
        (several(2, "--kv-cache-memory-bytes 1G", gpus="1"), "01", ["1", "1"]),
        (several(2, "--num-gpu-blocks-override=99 --gpu-memory-utilization=0.9", gpus="1"), "01", ["1", "1"]),
    ],
    ids=[
        *("one each", "shards", "shards on two nodes", "ranks on two nodes", "one worker sees all"),
        *("named", "shared by use", "shared by bytes", "shared by blocks"),
    ],
)
def test_workers_share_out_the_gpus_of_this_node_unless_a_group_names_them(
    wanted: Topology, gpus: str, found: list[str | None]
) -> None:
    assert gpus_of(wanted, [*gpus]) == found


def pair(*prefill_args: str) -> Topology:
    prefill = WorkerGroup(1, {"disaggregation_mode": "prefill"}, args=prefill_args)
    decode = WorkerGroup(2, {"disaggregation_mode": "decode"}, args=("-dp", "2"))
    return Topology(model="org/model", workers=(prefill, decode))


def test_roles_get_gpus_of_their_own_in_order() -> None:
    assert gpus_of(pair("-tp", "2"), ["0", "1", "2", "3", "4", "5"]) == ["0,1", "2,3", "4,5"]


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="not enough GPUs: worker-3 needs 1, 0 of 2 are left; start fewer"):
        gpus_of(several(3), ["0", "1"])
    with pytest.raises(ConfigError, match="not enough GPUs: decode-2 needs 2, 1 of 4 are left"):
        gpus_of(pair(), ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        ("0", "", "worker-1 and worker-2 would take 184 % of the memory of GPU 0"),
        ("0,1", "", "would take 184 % of the memory of GPU 0"),  # both begin with the first
        ("1", "--gpu-memory-utilization 0.6", "would take 120 % of the memory of GPU 1"),
    ],
)
def test_workers_that_would_not_fit_on_their_gpu_are_refused(gpus: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}; .*--gpu-memory-utilization"):
        gpus_of(several(2, words, gpus), ["0", "1"])


def test_pipelines_of_omni_may_share_a_gpu() -> None:
    """What a stage takes stands in its file, or nowhere: drawing takes what it needs."""
    omni = WorkerGroup(2, {"omni": True}, {"CUDA_VISIBLE_DEVICES": "0"})
    assert gpus_of(Topology(model="org/model", workers=(omni,)), ["0", "1"]) == ["0", "0"]
