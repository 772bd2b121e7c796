"""Tests the names, parameters and exceptions of vLLM that we rely on; loads no model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import socket
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.exceptions
import vllm.v1.engine.exceptions
from prometheus_client import Histogram
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import Logprob
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils import cpu_triton_utils
from vllm.utils.import_utils import import_pynvml
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, RequestStateStats, SchedulerStats
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dynamo_vllm.config import build, worker_plan
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.rules.flags import engine_flags
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.base import Counting, LoadFigures
from dynamo_vllm.engine.patches import process_context, prometheus_folder, table
from dynamo_vllm.engine.patches.cpu.speculative import KERNELS, expanded
from dynamo_vllm.engine.patches.patch import Where, installed, is_within
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.engine.vllm import convert as vllm_convert
from dynamo_vllm.engine.vllm import stats as vllm_stats
from dynamo_vllm.engine.vllm.direct import Tap
from dynamo_vllm.errors import (
    ConfigError,
    DynamoVllmError,
    EngineDead,
    EngineOverloaded,
    EngineRequestFailed,
    InvalidRequest,
    StartError,
    UnknownModel,
)
from dynamo_vllm.job import GUIDE_KINDS, Guide, Job, SamplingSpec
from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.roles.text import TOKENIZER_ARGUMENTS
from dynamo_vllm.serving.factories import engine_settings
from harness.settings import with_flags

EXPECTED: dict[str, type[DynamoVllmError]] = {
    "VLLMError": EngineRequestFailed,
    "VLLMClientError": InvalidRequest,
    "VLLMServerError": EngineRequestFailed,
    "VLLMValidationError": InvalidRequest,
    "VLLMNotFoundError": UnknownModel,
    "LoRAAdapterNotFoundError": UnknownModel,
    "VLLMUnprocessableEntityError": InvalidRequest,
    "GenerationError": EngineRequestFailed,
    "GracefulHTTPError": EngineOverloaded,
    "QueueOverflowError": EngineOverloaded,
    "MaxQueuedTokensError": EngineOverloaded,
    "EngineGenerateError": EngineRequestFailed,
    "EngineDeadError": EngineDead,
    "RetryableRequestError": EngineRequestFailed,  # since 0.32, of pooling models
    "ProfilerAlreadyActiveError": EngineOverloaded,  # since 0.32, of no request
}


def exceptions() -> list[type[Exception]]:
    found = {
        value
        for module in (vllm.exceptions, vllm.v1.engine.exceptions)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__.startswith("vllm")
    }
    return sorted(found, key=lambda cls: cls.__name__)


def test_every_exception_of_vllm_is_mapped() -> None:
    for cls in exceptions():
        assert cls.__name__ in EXPECTED, "a new exception of vLLM: decide whose fault it is"
        instance = cls.__new__(cls, "x")
        instance.args = ("what went wrong",)
        instance.message = "what went wrong"  # type: ignore[attr-defined]
        assert type(vllm_convert.error(instance)) is EXPECTED[cls.__name__]


def test_the_reason_of_an_empty_generate_error_is_its_cause() -> None:
    empty = vllm.v1.engine.exceptions.EngineGenerateError()
    empty.__cause__ = ValueError("the prompt is odd")
    assert str(vllm_convert.error(empty)) == "the prompt is odd"
    empty.__cause__ = vllm.v1.engine.exceptions.EngineDeadError()
    assert isinstance(vllm_convert.error(empty), EngineDead)


def test_async_llm_takes_what_we_give_it_at_its_start() -> None:
    """`test_vllm_names` compares what is called later."""
    made = inspect.signature(AsyncLLM.from_vllm_config).parameters
    assert {"stat_loggers", "enable_log_requests", "disable_log_stats"} <= set(made)


def test_adapter_is_told_apart_by_name_in_the_cache_and_by_id_in_the_engine() -> None:
    """If this changes, `lora.registry._identify` must change too."""
    from vllm.v1.core import kv_cache_utils

    assert list(LoRARequest.__struct_fields__[:3]) == ["lora_name", "lora_int_id", "lora_path"]
    adapter = SimpleNamespace(lora_name="a#1", lora_int_id=7, lora_path="/a")
    (key,) = kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter))
    assert key in ("a#1", ("lora", "a#1", "/a")), "since 0.31 by its folder too"


def test_stat_loggers_are_called_as_ours_is() -> None:
    names = ["self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"]
    assert list(inspect.signature(StatLoggerBase.record).parameters) == names


def test_processes_of_ranks_are_where_they_are_looked_at() -> None:
    assert "self.processes" in inspect.getsource(CoreEngineProcManager.__init__)
    assert callable(current_platform.device_id_to_physical_device_id)
    assert issubclass(import_pynvml().NVMLError, Exception)


def test_embedding_layer_has_what_our_patch_uses() -> None:
    source = inspect.getsource(inspect.unwrap(VocabParallelEmbeddingWithLoRA.forward))
    assert "self.lora_a_stacked_2d" in source and "self.lora_b_stacked" in source
    assert list(inspect.signature(GPUModelRunner._preprocess).parameters)[:2] == ["self", "scheduler_output"]


@pytest.mark.skipif(not is_within(str(installed("vllm")), "<0.31"), reason="vLLM does so itself")
def test_kernels_for_cpus_take_what_those_of_triton_take() -> None:
    for name in KERNELS:
        owner = getattr(rejection_sampler, f"_{name}")
        names = set(inspect.signature(getattr(cpu_triton_utils, f"{name}_kernel").func).parameters)
        assert hasattr(owner, "kernel") and set(owner._dispatch_arg_names) - {"max_spec_len"} <= names


def test_every_guess_gets_what_its_request_asked_for() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expanded(torch.tensor([0.5, 1.0, 0.0]), ends, 5, replace_from=0, replace_to=1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0] and found.dtype == torch.float32
    ids = torch.tensor([7, 8, 9], dtype=torch.int32)
    assert expanded(ids, ends, 5).tolist() == [7, 7, 9, 9, 9]


def test_kv_events_of_a_rank_have_the_port_that_we_count_on() -> None:
    assert ZmqEventPublisher.offset_endpoint_port("tcp://*:5557", 2) == "tcp://*:5559"


def test_a_full_spec_becomes_sampling_params() -> None:
    spec = SamplingSpec(
        max_tokens=5,
        min_tokens=1,
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        seed=3,
        stop=("x",),
        stop_token_ids=(4,),
        ignore_eos=True,
        include_stop_in_output=True,
        logprobs=2,
        prompt_logprobs=1,
        skip_special_tokens=False,
        max_thinking_tokens=9,
        logit_bias={3: 1.0},
        detokenize=True,
    )
    made = vllm_convert.sampling_params(spec)
    assert isinstance(made, SamplingParams)
    assert (made.n, made.max_tokens, made.min_tokens, made.top_k, made.seed) == (2, 5, 1, 0, 3)
    assert (made.stop, made.stop_token_ids, made.ignore_eos) == (["x"], [4], True)
    assert (made.logprobs, made.prompt_logprobs, made.thinking_token_budget) == (2, 1, 9)
    assert made.logit_bias == {3: 1.0}


def test_every_constraint_reaches_vllm() -> None:
    values: dict[str, Any] = {"json": {"type": "object"}, "json_object": True, "choice": ["a"]}
    for kind in GUIDE_KINDS:
        value = values.get(kind, "a")
        assert getattr(vllm_convert.structured_outputs(Guide(**{kind: value})), kind) == value


PATTERNS: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "patternProperties": {"^x": {"type": "string"}},
}
"""A schema that only outlines supports."""


def checked(schema: dict[str, object], backend: str) -> str | None:
    """Returns the backend that vLLM chooses for a schema."""
    table.apply(Where.WORKER)
    params = vllm_convert.sampling_params(SamplingSpec(max_tokens=1, guide=Guide(json=schema)))
    model, config = SimpleNamespace(is_diffusion=False), SimpleNamespace(backend=backend)
    params._validate_structured_outputs(model, config, tokenizer=object())
    chosen: str | None = params.structured_outputs._backend
    return chosen


def test_a_schema_is_never_given_to_outlines_unless_the_operator_says_so() -> None:
    deep: dict[str, object] = {"type": "string"}
    for _ in range(18):  # outlines would make 20 MB of it
        deep = {"type": "array", "items": deep}
    for schema in (PATTERNS, {**PATTERNS, "properties": {"a": deep}}):
        with pytest.raises(vllm.exceptions.VLLMValidationError, match="patternProperties"):
            checked(schema, "auto")
    assert checked({"type": "object"}, "auto") == "xgrammar"
    assert checked(PATTERNS, "outlines") == "outlines"


def test_what_clients_tell_the_template_reaches_no_parameter_of_the_tokenizer() -> None:
    known = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    templates = {"tools", "documents", "add_generation_prompt", "continue_final_message", "kwargs"}
    assert known - templates - {"self", "chat_template", "tokenize"} == TOKENIZER_ARGUMENTS


def test_a_token_that_cannot_come_has_a_logprob_that_json_can_say() -> None:
    """A guide gives all other tokens minus infinity; vLLM's own server reports -9999."""
    at = {7: Logprob(-0.5, 1, "a"), 8: Logprob(float("-inf"), 2, "b"), 9: Logprob(float("nan"), 3, "c")}
    choice = CompletionOutput(0, "a", [7], None, [at])
    result = RequestOutput("j", None, [5, 7], [None, at], [choice], finished=False)
    (made,) = vllm_convert.outputs(result)
    for found in (made.logprobs, made.prompt_logprobs):
        assert found is not None and found[-1] is not None
        assert [c.logprob for c in found[-1].candidates] == [-0.5, -9999.0, -9999.0]


def test_given_up_with_a_constraint_is_the_clients_fault() -> None:
    guided = Job("j", [1], SamplingSpec(max_tokens=1, guide=Guide(grammar="x")))
    assert isinstance(vllm_convert.error_without_exception(guided), InvalidRequest)
    plain = Job("j", [1], SamplingSpec(max_tokens=1))
    assert isinstance(vllm_convert.error_without_exception(plain), EngineRequestFailed)


# Flags both sides have: ours takes them and hands on what the engine needs. Media are loaded by us alone.
SHARED = {
    "--model",
    "--served-model-name",
    "--reasoning-parser",
    "--enable-prompt-embeds",
    "--allowed-local-media-path",
    "--allowed-media-domains",
}


def test_our_flags_hide_no_other_flag_of_vllm() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    theirs = {flag for action in parser._actions for flag in action.option_strings}
    ours = {flag for item in build.declared(WorkerOptions) for flag in item.flags}
    # vLLM 0.30 has no --log-level; ours also sets the level of vLLM, whatever its version.
    assert ours & theirs - {"--log-level"} == SHARED


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return EngineSettings(model=str(make_tiny_model(tmp_path_factory.mktemp("m") / "tiny")))


def arguments(found: vllm_arguments.Resolved) -> Any:
    """Returns all of vLLM's arguments; our own types declare only those that we use."""
    return found.args


def test_defaults_are_set_and_named(settings: EngineSettings) -> None:
    found = vllm_arguments.resolve(settings)
    assert arguments(found).enable_prefix_caching is True
    names = {"enable_prefix_caching", "block_size", "runner", "kv_events_config"}
    assert {f.argument for f in found.fired} >= names


def test_what_the_user_sets_stands(settings: EngineSettings) -> None:
    argv = ("--block-size", "64", "--no-enable-prefix-caching", "--max-num-seqs", "7")
    found = vllm_arguments.resolve(EngineSettings(model=settings.model, argv=argv))
    assert arguments(found).block_size == 64
    assert arguments(found).enable_prefix_caching is False
    assert arguments(found).max_num_seqs == 7
    assert arguments(found).kv_events_config is None


def test_an_object_in_pieces_is_put_together_as_vllm_does(settings: EngineSettings) -> None:
    name, argv = "--hf-overrides", []
    for key, value in (("a.b", "1"), ("a.c", "x"), ("list+", "d,e"), ("list+", "f"), ("on", "true")):
        argv += [f"{name}.{key}", value]
    argv += [f"{name}.a.b=2", name, '{"z": 1}']
    given = vllm_arguments.given_flags(dataclasses.replace(settings, argv=tuple(argv)))
    assert given["hf_overrides"]["a"] == {"b": 2, "c": "x"}
    assert json.loads(engine_flags(argv)["hf_overrides"] or "") == given["hf_overrides"]


def test_prompt_embeds_are_switched_on_in_vllm(settings: EngineSettings) -> None:
    asked = EngineSettings(model=settings.model, takes_embeds=True)
    assert arguments(vllm_arguments.resolve(asked)).enable_prompt_embeds is True
    assert arguments(vllm_arguments.resolve(settings)).enable_prompt_embeds is False
    plan = worker_plan.parse(["--model", "m", "--enable-prompt-embeds"], {})
    assert engine_settings(plan, {}, "/tmp").takes_embeds


def test_several_ranks_get_ports_in_a_row(settings: EngineSettings) -> None:
    found = vllm_arguments.resolve(with_flags(settings, "--data-parallel-size", "2"))
    assert arguments(found).kv_events_config.endpoint.startswith("tcp://[::ffff:127.0.0.1]:")


@pytest.mark.skipif(machine.device() != "cpu", reason="on a GPU vLLM measures what is free itself")
@pytest.mark.parametrize(
    ("argv", "here", "engines"), [((), 4, 4), (("-dp", "2"), None, 2), (("-dp", "2"), 8, 8)]
)
def test_engines_of_one_machine_share_its_free_memory(
    settings: EngineSettings, argv: tuple[str, ...], here: int | None, engines: int
) -> None:
    made = with_flags(dataclasses.replace(settings, engines_here=here), *argv)
    (fired,) = [f for f in vllm_arguments.resolve(made).fired if f.argument == "kv_cache_memory_bytes"]
    assert f"for {engines} engines together" in fired.reason


def test_taken_side_channel_port_is_refused(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's thread would end with the error, and its start would wait for that thread forever."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")  # so that what resolve sets is taken back
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made = EngineSettings(
            model=settings.model,
            kv_transfer={"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            side_channel_host="127.0.0.1",
            side_channel_port=port,
        )
        with pytest.raises(StartError, match=f"--side-channel-port {port} on 127.0.0.1 cannot be used"):
            vllm_arguments.resolve(made)
    vllm_arguments.resolve(made)
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(port)


@pytest.mark.parametrize("argv", [("--no-such-flag",), ("--block-size", "many"), ("--max-num-seqs",)])
def test_a_bad_flag_is_refused_in_one_line(settings: EngineSettings, argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=argv[0].lstrip("-")):
        vllm_arguments.resolve(EngineSettings(model=settings.model, argv=argv))


@pytest.mark.skipif(machine.device() != "cpu", reason="a GPU takes them all")
@pytest.mark.parametrize("method", ["ngram", "draft_model", "ngram_gpu"])
def test_a_cpu_takes_the_guesses_that_were_tried_with_this_vllm(
    settings: EngineSettings, method: str
) -> None:
    guesses = {"method": method, "num_speculative_tokens": 2}
    guesses |= {"model": settings.model} if method == "draft_model" else {"prompt_lookup_max": 2}
    given = dataclasses.replace(settings, argv=("--speculative-config", json.dumps(guesses)))
    args = vllm_arguments.resolve(given).args
    is_taken = method == "ngram" or (method == "draft_model" and not is_within(vllm.__version__, "<0.31"))
    refusal = f"does not support {method} on a CPU; use .*ngram"
    with contextlib.nullcontext() if is_taken else pytest.raises(ConfigError, match=refusal):
        vllm_arguments.create_config(args, given)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    made = EngineSettings(model=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot serve"):
        vllm_arguments.create_config(vllm_arguments.resolve(made).args, made)


def test_batch_sizes_are_those_of_vllm_serve(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's defaults depend on the usage context; only two contexts have any."""
    sizes = ({UsageContext.OPENAI_API_SERVER: 3333}, {UsageContext.OPENAI_API_SERVER: 77})
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", classmethod(lambda cls, world_size: sizes))
    made = EngineSettings(model=settings.model, argv=("--max-model-len", "512"))
    found = vllm_arguments.create_config(vllm_arguments.resolve(made).args, made).scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (3333, 77)


def test_what_the_direct_way_out_touches() -> None:
    """Checks parameters and fields of vLLM's output handling; the parity tests show what they do."""
    calls = OutputProcessor.process_outputs
    first = ["self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"]
    assert list(inspect.signature(calls).parameters) in (first, [*first, "weight_version"])
    theirs = inspect.signature(RequestState.make_request_output).parameters
    ours = inspect.signature(Tap.output).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    plain = EngineCoreOutput("r", [1])
    assert (plain.finish_reason, plain.events, plain.num_nans_in_logits) == (None, None, 0)
    stats = IterationStats()
    assert (stats.num_generation_tokens, stats.inter_token_latencies_iter) == (0, [])
    assert {"num_generation_tokens", "last_token_ts"} <= set(RequestStateStats.__dataclass_fields__)


def test_a_time_observed_often_is_counted_as_often() -> None:
    """Also above the last bucket and at a bound; the client library has no function for it."""
    one, many = (Histogram("x", "x", buckets=(0.1, 0.5, 2.0), registry=None) for _ in range(2))
    for seconds, times in ((0.05, 3), (0.1, 2), (0.7, 4), (9.0, 2)):
        vllm_stats.observe(many, seconds, times)
        for _ in range(times):
            one.observe(seconds)

    def counted(made: Histogram) -> list[tuple[str, dict[str, str], float]]:
        (metric,) = made.collect()
        return [(s.name, s.labels, round(s.value, 9)) for s in metric.samples if s.name != "x_created"]

    assert counted(one) == counted(many)
    assert counted(one)[0][2] == 5


def test_figures_of_steps_add_up() -> None:
    """vLLM reports each step alone; a step without output has no iteration figures."""
    told: list[LoadFigures] = []
    logger = vllm_stats.Load(3, told.append, lambda rank: None, Counting())
    for tokens in (5, 7, None):
        step = SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.5)
        step.prefix_cache_stats.record(100, 64, preempted=False)
        step.prefix_cache_stats.record(100, 64, preempted=True)
        iteration = IterationStats() if tokens else None
        if iteration is not None:
            iteration.num_generation_tokens = tokens
        logger.record(step, iteration)
    assert told[-1] == LoadFigures(3, 2, 1, 0.5, generated_tokens=12, prefix_queries=300, prefix_hits=192)


def test_engine_cores_are_made_in_a_context_that_we_choose() -> None:
    """`core_fork` uses its own context while an engine starts."""
    from vllm.v1.engine import coordinator, utils

    table.apply(Where.WORKER)
    ours = BaseContext()
    with process_context.using(ours):
        assert utils.get_mp_context() is coordinator.get_mp_context() is ours
    assert utils.get_mp_context() is not ours


def test_class_of_a_known_model_can_be_registered_before_it_is_asked_for() -> None:
    from vllm import ModelRegistry

    from dynamo_vllm.engine.process import preload

    preload.import_vllm(["Qwen3ForCausalLM", "NoSuchModel"])
    known = ModelRegistry.models["Qwen3ForCausalLM"]
    assert type(known).__name__ == "_RegisteredModel", "vLLM starts no process to look at it"


def test_metrics_heed_a_folder_that_is_named_after_their_import(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import values

    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    prometheus_folder.apply()
    assert values.ValueClass is values.MutexValue and not prometheus_folder.is_set_too_late()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    assert prometheus_folder.is_set_too_late()
    prometheus_folder.apply()
    assert values.ValueClass is not values.MutexValue


def test_figures_leave_out_what_is_not_counted() -> None:
    """The load of a rank is still reported, because the router needs it."""
    told: list[LoadFigures] = []
    counting = Counting()
    make_load, series = vllm_stats.loggers(told.append, lambda rank: None, counting)
    assert issubclass(series, PrometheusStatLogger), "or vLLM adds its own"
    load = make_load(None, 0)
    step = SchedulerStats(num_running_reqs=2, kv_cache_usage=0.5)
    step.prefix_cache_stats.record(100, 64, preempted=False)
    with counting.paused():
        load.record(step, IterationStats())
        series.record(None, step, IterationStats())  # no instance: it would touch one if it counted
    assert told == [LoadFigures(0, 2, 0, 0.5)]
