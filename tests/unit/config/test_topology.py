"""The `serve` file, and the command line over it."""

from __future__ import annotations

import pytest

from dynamo_vllm.config import build, topology
from dynamo_vllm.config.options import FrontendOptions, GatewayOptions, WorkerOptions
from dynamo_vllm.config.topology import CommandLine, Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError


def test_whole_file_is_read() -> None:
    found = topology.read(
        {
            "model": "org/model",
            "frontend": {"port": 8080, "router-mode": "round-robin"},
            "workers": [
                {
                    "count": 2,
                    "role": "decode",
                    "served-model-name": ["a", "b"],
                    "fake_engine": {"token_ms": 5},
                    "env": {"CUDA_VISIBLE_DEVICES": 1, "FLAG": True},
                    "args": ["--max-model-len", 4096, "--hf-overrides", {"a": 1}],
                },
                {"model": "/other"},
            ],
        },
        "s.yaml",
    )
    assert found.model == "org/model"
    assert found.frontend == {"port": 8080, "router": "round-robin"}
    assert found.workers == (
        WorkerGroup(
            count=2,
            options={
                "disaggregation_mode": "decode",
                "served_model_name": ["a", "b"],
                "fake_engine": '{"token_ms": 5}',
            },
            env={"CUDA_VISIBLE_DEVICES": "1", "FLAG": "1"},
            args=("--max-model-len", "4096", "--hf-overrides", '{"a": 1}'),
        ),
        WorkerGroup(options={"model": "/other"}),
    )
    assert topology.read({"model": "m"}, "s.yaml") == Topology(model="m", workers=(WorkerGroup(),))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "s.yaml must be a mapping"),
        ({"worker": []}, "s.yaml: 'worker' is unknown; did you mean 'workers'?"),
        ({"frontend": {"prot": 1}}, "s.yaml: frontend: 'prot' is unknown; did you mean 'port'?"),
        ({"frontend": {"port": None}}, "frontend: port has no value"),
        ({"workers": {"count": 1}}, "workers must be a list"),
        ({"workers": []}, "workers must be a list"),
        ({"workers": [{}, {"count": 0}]}, "workers[1]: count 0 is not a number of workers"),
        ({"workers": [{"count": True}]}, "count True is not a number"),
        ({"workers": [{"rolle": "agg"}]}, "'rolle' is unknown; did you mean 'role'?"),
        ({"workers": [{"cuont": 1}]}, "did you mean 'count'?"),
        ({"workers": [{"max_model_len": 1}]}, "flags of vLLM go under args"),
        ({"workers": [{"args": "--enforce-eager"}]}, "args must be a list"),
        ({"workers": [{"args": [["x"]]}]}, "is neither text nor a number"),
        (
            {"workers": [{"args": ["--max-model-len 8192"]}]},
            "'--max-model-len 8192' is one word; write [--max-model-len, 8192]",
        ),
        ({"workers": [{"status_fd": 1}]}, "'status_fd' is unknown"),
    ],
)
def test_mistake_in_the_file_is_named(data: object, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        topology.read(data, "s.yaml")
    assert message in str(refused.value)


def test_command_line_stands_above_the_file() -> None:
    file = Topology(
        model="m",
        frontend={"port": 1, "host": "h"},
        workers=(WorkerGroup(2, {"engine": "vllm"}, args=("--a",)),),
    )
    line = CommandLine(frontend={"port": "2"}, worker={"engine": "fake"}, args=("--b",), workers=3)
    found = topology.override(file, line)
    assert found.frontend == {"port": "2", "host": "h"}
    assert found.workers == (WorkerGroup(3, {"engine": "fake"}, args=("--a", "--b")),)


PAIR = (
    WorkerGroup(2, {"disaggregation_mode": "prefill"}),
    WorkerGroup(3, {"disaggregation_mode": "decode"}),
)
ONE_OF_EACH = CommandLine(prefill=1, decode=1)


def test_numbers_of_prefill_and_decode_workers_make_two_groups() -> None:
    file = Topology(model="m", frontend={"port": 1})  # a file may leave the workers to the command line
    line = CommandLine(worker={"engine": "fake"}, args=("--a",), prefill=2, decode=3)
    found = topology.override(file, line)
    assert (found.model, found.frontend) == ("m", {"port": 1})
    assert [(g.count, g.options["disaggregation_mode"]) for g in found.workers] == [
        (g.count, g.options["disaggregation_mode"]) for g in PAIR
    ]
    assert all(g.options["engine"] == "fake" and g.args == ("--a",) for g in found.workers)


@pytest.mark.parametrize(
    ("groups", "line", "message"),
    [
        ((WorkerGroup(), WorkerGroup()), CommandLine(workers=2), "the file has 2 groups"),
        (PAIR, ONE_OF_EACH, "--prefill 1 --decode 1: the file already has groups of workers"),
        ((WorkerGroup(2),), ONE_OF_EACH, "--prefill 1 --decode 1: the file already has groups of workers"),
        ((WorkerGroup(env={"A": "1"}),), ONE_OF_EACH, "the file already has groups of workers"),
        (
            (),
            CommandLine(worker={"disaggregation_mode": "decode"}, prefill=1, decode=1),
            "leave --disaggregation-mode out",
        ),
        (
            (WorkerGroup(options={"vllm_native_encoder_worker": True}),),
            CommandLine(encode=1),
            "--encode 1: the file already has encode workers",
        ),
    ],
)
def test_numbers_of_workers_are_refused_beside_groups_of_a_file(
    groups: tuple[WorkerGroup, ...], line: CommandLine, message: str
) -> None:
    file = Topology(workers=groups) if groups else Topology()
    with pytest.raises(ConfigError, match=message):
        topology.override(file, line)


@pytest.mark.parametrize("name", ["disaggregation_mode", "is_decode_worker", "multimodal_decode_worker"])
def test_one_role_for_all_is_refused_beside_roles_of_a_file(name: str) -> None:
    line = CommandLine(worker={name: "decode" if name == "disaggregation_mode" else True})
    with pytest.raises(
        ConfigError, match=r"the file already sets the role of each worker; leave it out, or set 'role'"
    ):
        topology.override(Topology(workers=PAIR), line)
    (group,) = topology.override(Topology(workers=PAIR[1:]), line).workers
    assert group.options[name]


def test_older_names_of_roles_in_a_file_count_too() -> None:
    groups = (
        WorkerGroup(options={"is_prefill_worker": True}),
        WorkerGroup(options={"is_decode_worker": "yes"}),
    )
    prefill, decode, encode = topology.override(Topology(workers=groups), CommandLine(encode=1)).workers
    assert prefill.options["route_to_encoder"] is True
    assert "route_to_encoder" not in decode.options
    assert encode.options == {"disaggregation_mode": "encode"}


def test_values_become_flags() -> None:
    values = {"served_model_name": ["a", "b"], "kv_events": False, "omni": "yes", "drain_seconds": "5"}
    words = "--served-model-name a b --omni --no-kv-events --drain-seconds=5.0"
    assert topology.to_argv(WorkerOptions, values) == words.split()
    assert topology.to_argv(WorkerOptions, {"served_model_name": 4711}) == ["--served-model-name", "4711"]


def test_blanks_inside_a_value_are_its_own() -> None:
    args = ["--kv-transfer-config", '{"a": "b c"}', '--x={"a": "b c"}', "-tp", -1, ""]
    (group,) = topology.read({"workers": [{"args": args}]}, "s.yaml").workers
    assert group.args == tuple(map(str, args))


def test_value_of_the_wrong_type_is_refused() -> None:
    for name, value, message in (
        ("port", "many", "--port='many' is not a whole number"),
        ("port", 8080.5, "--port=8080.5 is not a whole number"),
        ("port", True, "--port=True is not a whole number"),
        ("drain_seconds", True, "--drain-seconds=True is not a number"),
        ("host", ["a", "b"], r"--host=\['a', 'b'\] is a list; give one value"),
    ):
        with pytest.raises(ConfigError, match=message):
            topology.to_argv(FrontendOptions, {name: value})


def test_an_option_that_is_given_several_times_is_given_once_per_value() -> None:
    words = topology.to_argv(GatewayOptions, {"cors_origin": ["https://a.example", "https://b.example"]})
    assert words == ["--cors-origin=https://a.example", "--cors-origin=https://b.example"]
    options, rest = build.parse(GatewayOptions, words, {}, "gateway", "")
    assert (options.cors_origin, rest) == (("https://a.example", "https://b.example"), [])


# --- names of groups ------------------------------------------------------------------------------------


def test_group_may_have_a_name_of_its_own() -> None:
    found = topology.read({"workers": [{"name": "small.1", "count": 2}, {}]}, "s.yaml")
    assert found.workers == (WorkerGroup(2, name="small.1"), WorkerGroup())
    with pytest.raises(ConfigError, match="two groups of workers have the name 'a'; rename one"):
        topology.read({"workers": [{"name": "a"}, {"name": "a"}]}, "s.yaml")


def test_what_is_no_name_of_a_group_is_refused() -> None:
    for name in ("", "two words", "1st", 7, "a/b", "x" * 64):
        with pytest.raises(ConfigError, match=r"s.yaml: workers\[0\]: name .* is no name of a group"):
            topology.read({"workers": [{"name": name}]}, "s.yaml")
