"""Lists every patch of vLLM, vLLM-Omni, NIXL and others, and applies those that a process needs.

Imports none of these packages before a patch is applied; `dynamo-vllm check` shows the table.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches import (
    coordinator,
    grammar_steps,
    grammar_threads,
    guides,
    kv_events,
    nixl_pause,
    omni_diffusion,
    omni_store,
    process_context,
    prometheus_folder,
)
from dynamo_vllm.engine.patches.cpu import (
    compiling,
    lora,
    nixl_cores,
    seeds,
    speculative,
    thread_count,
    topology,
)
from dynamo_vllm.engine.patches.patch import VLLM_VERSIONS, Patch, State, Where, installed, is_within

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)
_VLLM = "https://github.com/vllm-project/vllm"
_WARM_UP = ("vllm.v1.worker.cpu_model_runner.CPUModelRunner.warming_up_model",)
_DIFFUSERS = f"{omni_diffusion.ADAPTER}.DiffusersAdapterPipeline"
_SAMPLER = "vllm.v1.sample.rejection_sampler"
_GUIDED = (Where.WORKER, Where.OMNI_WORKER, Where.GUIDE_CHECKER)
_in_vllm = partial(Patch, package="vllm", versions=VLLM_VERSIONS)
_in_events = partial(
    _in_vllm, targets=("vllm.v1.core.block_pool.BlockPool._build_block_stored_event",), where=(Where.ENGINE,)
)
_on_cpu = partial(_in_vllm, where=(Where.CPU_WORKER,), device="cpu")
_in_omni = partial(Patch, package="vllm-omni", versions=">=0.30,<0.31", where=(Where.OMNI,))

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="prometheus-folder",
        targets=("prometheus_client.values.ValueClass",),
        package="prometheus_client",
        versions=">=0.21",
        defect="a multi-process folder that is set after the import is ignored",
        where=(Where.WORKER,),
        apply=prometheus_folder.apply,
        still_needed=prometheus_folder.still_needed,
        only_if=prometheus_folder.is_set_too_late,
    ),
    _in_vllm(
        name="process-context",
        targets=("vllm.v1.engine.coordinator.get_mp_context", "vllm.v1.engine.utils.get_mp_context"),
        defect="engine cores can only be spawned, or forked from the worker",
        where=(Where.WORKER, Where.NODE),
        apply=process_context.apply,
        still_needed=process_context.still_needed,
    ),
    _in_vllm(
        name="coordinator-orphans",
        targets=("vllm.v1.engine.coordinator.DPCoordinatorProc.run_coordinator",),
        defect="the coordinator of data-parallel ranks outlives a worker that was killed",
        upstream=f"{_VLLM}/issues/55510",
        where=(Where.WORKER,),
        apply=coordinator.apply,
        still_needed=coordinator.still_needed,
    ),
    _in_vllm(
        name="guides-outlines",
        targets=("vllm.v1.structured_output.backend_outlines.validate_structured_output_request_outlines",),
        defect="schemas that xgrammar does not support go to outlines, which may use all memory for one",
        upstream=f"{_VLLM}/issues/54003",
        where=_GUIDED,
        apply=guides.refuse_outlines,
        still_needed=guides.outlines_is_asked,
    ),
    _in_vllm(
        name="guides-judged",
        targets=("vllm.sampling_params.SamplingParams._validate_structured_outputs",),
        defect="a guide that was checked is checked again, on the event loop and without a limit",
        upstream=f"{_VLLM}/issues/54003",
        where=_GUIDED,
        apply=guides.skip_checked,
        still_needed=guides.checked_guides_are_checked_again,
    ),
    _in_vllm(
        name="guides-one-thread",
        targets=("xgrammar.GrammarCompiler",),
        defect="a guide is compiled in eight threads, even in a guide checker with little CPU time",
        where=(Where.GUIDE_CHECKER,),
        apply=guides.compile_in_one_thread,
        still_needed=guides.eight_threads_compile,
    ),
    Patch(
        name="nixl-pause",
        targets=("nixl._api.nixlBind.nixlAgent",),
        package="nixl",
        versions=">=1.3.2,<1.6",
        defect="the progress thread of an agent polls without a pause and uses a whole core",
        where=(Where.ENGINE, Where.TRANSFER),
        apply=nixl_pause.apply,
        still_needed=nixl_pause.still_needed,
        only_if=nixl_pause.is_wanted,
    ),
    _in_vllm(
        name="cpu-topology",
        targets=("vllm.utils.cpu_resource_utils._get_cpu_list",),
        defect="cores are counted with lscpu, which minimal machines do not have",
        where=(Where.ENGINE,),
        apply=topology.apply,
        still_needed=topology.still_needed,
        only_if=topology.kernel_lists_cores,
    ),
    _in_vllm(
        name="grammar-steps",
        targets=tuple(
            f"vllm.v1.structured_output.{grammar}.{name}"
            for grammar in ("backend_xgrammar.XgrammarGrammar", "backend_guidance.GuidanceGrammar")
            for name in ("fill_bitmask", "validate_tokens", "accept_tokens")
        ),
        defect="a small guide can make every step of the engine slower than the one before",
        where=(Where.ENGINE,),
        apply=grammar_steps.apply,
        still_needed=grammar_steps.still_needed,
    ),
    _in_vllm(
        name="grammar-threads",
        targets=("vllm.v1.structured_output.StructuredOutputManager.__init__",),
        defect="guides are compiled one after another, with the same priority as the engine's steps",
        where=(Where.ENGINE,),
        apply=grammar_threads.apply,
        still_needed=grammar_threads.still_needed,
    ),
    _in_events(
        name="kv-events-adapters",
        defect="the name of an adapter is also among a block's extra keys, where the router misreads it",
        apply=kv_events.apply_adapters,
        still_needed=kv_events.adapters_are_keys,
    ),
    _in_events(
        name="kv-events-salts",
        defect="a cache salt lacks the prefix that the router expects, and only the first block has it",
        apply=kv_events.apply_salts,
        still_needed=kv_events.salts_are_plain_keys_of_the_first_block,
    ),
    _in_events(
        name="kv-events-media",
        defect="events name an image as the engine does; the router knows only the frontend's name",
        apply=kv_events.apply_media,
        still_needed=kv_events.media_are_named_as_in_the_engine,
    ),
    _in_events(
        name="kv-events-embeds",
        defect="prompt embeddings are named by bytes, so the router drops the whole batch of events",
        apply=kv_events.apply_embeds,
        still_needed=kv_events.embeds_are_named_by_bytes,
    ),
    _on_cpu(
        name="cpu-seeds",
        targets=("vllm.v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync",),
        defect="a seeded prompt that is prefilled in several steps crashes the engine",
        apply=seeds.apply,
        still_needed=seeds.still_needed,
    ),
    _on_cpu(
        name="cpu-nixl-cores",
        targets=("vllm.platforms.cpu.CpuPlatform.discover_numa_topology",),
        defect="the connector moves every engine of the machine onto the same last core",
        upstream=f"{_VLLM}/issues/58033",
        apply=nixl_cores.apply,
        still_needed=nixl_cores.still_needed,
        only_if=nixl_cores.threads_are_not_bound,
    ),
    _on_cpu(
        name="cpu-guesses-kernels",
        versions=">=0.30,<0.31",
        targets=tuple(f"{_SAMPLER}._{name}.kernel" for name in speculative.KERNELS),
        defect="speculative tokens are verified with Triton kernels, which a CPU does not have",
        apply=speculative.use_cpu_kernels,
        still_needed=speculative.sampler_keeps_its_kernels,
        only_if=speculative.triton_is_missing,
    ),
    _on_cpu(
        name="cpu-guesses-temperatures",
        targets=(f"{_SAMPLER}.expand_batch_to_tokens",),
        defect="the temperatures of speculative tokens are read from uninitialised memory",
        upstream=f"{_VLLM}/pull/42638",
        apply=speculative.expand,
        still_needed=speculative.kernel_writes_into_a_copy,
        only_if=speculative.triton_is_missing,
    ),
    _on_cpu(
        name="cpu-compiled-sampler",
        targets=("vllm.v1.sample.ops.topk_topp_sampler.compiled_random_sample",),
        defect="the first sampled request waits for a C++ compiler, and crashes the engine if there is none",
        upstream=f"{_VLLM}/pull/47756",
        apply=compiling.unwrap_sampler,
        still_needed=compiling.sampler_is_compiled,
    ),
    _on_cpu(
        name="cpu-compiled-requests",
        targets=_WARM_UP,
        defect="parts of a model and log-probabilities are compiled during requests",
        apply=compiling.compile_in_warm_up,
        still_needed=compiling.requests_are_compiled_for,
    ),
    _on_cpu(
        name="cpu-failed-compilation",
        targets=_WARM_UP,
        defect="a model that cannot be compiled crashes the engine at every start",
        # After the one above, and so around it: on failure that one leaves torch unchanged.
        apply=compiling.run_eagerly_without_compiler,
        still_needed=compiling.failed_compilation_ends_the_engine,
    ),
    _on_cpu(
        name="cpu-adapters-beside-embeds",
        targets=(
            "vllm.lora.layers.VocabParallelEmbeddingWithLoRA.forward",
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner._preprocess",
        ),
        defect="prompt embeddings in one batch with tokens crash an engine with LoRA enabled",
        upstream=f"{_VLLM}/issues/51122",
        apply=lora.apply,
        still_needed=lora.still_needed,
    ),
    _on_cpu(
        name="cpu-thread-count",
        targets=("vllm.v1.worker.cpu_worker.CPUWorker.init_device",),
        defect="a forked engine core cannot change its number of threads",
        apply=thread_count.apply,
        still_needed=thread_count.still_needed,
    ),
    _in_omni(
        name="omni-log",
        targets=(f"{_DIFFUSERS}._build_call_kwargs",),
        defect="every prompt and every diffusion step is written to the log",
        apply=omni_diffusion.log_warnings_only,
        still_needed=omni_diffusion.every_step_is_logged,
    ),
    _in_omni(
        name="omni-guidance",
        targets=(f"{_DIFFUSERS}._build_call_kwargs",),
        defect="a request without a guidance scale gets no guidance instead of the model's default",
        apply=omni_diffusion.leave_guidance_to_the_pipeline,
        still_needed=omni_diffusion.guidance_is_always_given,
    ),
    _in_omni(
        name="omni-cancellation",
        targets=(f"{_DIFFUSERS}._build_call_kwargs", f"{_DIFFUSERS}.supports_request_cancellation"),
        defect="a cancelled image is generated to the end",
        apply=omni_diffusion.stop_cancelled_requests,
        still_needed=omni_diffusion.cancelled_requests_continue,
    ),
    _in_omni(
        name="omni-goodbye",
        targets=("vllm_omni.diffusion.stage_diffusion_client.StageDiffusionClient.shutdown",),
        defect="the worker waits forever for a diffusion stage that died",
        apply=omni_diffusion.shut_down_without_waiting,
        still_needed=omni_diffusion.shutdown_waits,
    ),
    _in_omni(
        name="omni-store",
        targets=("torch.distributed.rendezvous._create_c10d_store",),
        defect="the torch store of a diffusion stage listens on every address",
        apply=omni_store.apply,
        still_needed=omni_store.still_needed,
    ),
)
"""In the order in which they are applied."""
_applied: set[str] = set()
_warned: set[str] = set()


def apply(where: Where, patches: Iterable[Patch] = PATCHES) -> None:
    """Applies the patches that this process needs and does not have yet; its forks inherit them."""
    for patch in patches:
        if where not in patch.where or patch.name in _applied:
            continue
        state = patch.state()
        if state is State.APPLIED and patch.only_if():
            patch.apply()
            _applied.add(patch.name)
        elif state is State.OTHER_VERSION and patch.name not in _warned:
            _warned.add(patch.name)
            version = str(installed(patch.package))
            if patch.package != "vllm" or not is_within(version, VLLM_VERSIONS):
                found = f"{patch.package} {version}"
                logger.warning(
                    "%s is not applied: it is for %s, and %s is installed", patch.name, patch.versions, found
                )
