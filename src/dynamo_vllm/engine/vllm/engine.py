"""Implements the Engine protocol with vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config.engine_rules import heard_at
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.base import Counting
from dynamo_vllm.engine.encoder_cache.folder import Folder, Unusable
from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process import core_fork, prometheus
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.process.kv_event_relay import EventRelay
from dynamo_vllm.engine.structured_output.gate import GuideGate
from dynamo_vllm.engine.structured_output.judge import Limits
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.engine.vllm import rank_activity
from dynamo_vllm.errors import DynamoVllmError, EngineDead, InvalidRequest, StartError
from dynamo_vllm.job import AdapterLimits, Embeds, EngineFacts, Job, MediaPrompt, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from vllm.parser.abstract_parser import Parser
    from vllm.v1.engine.async_llm import AsyncLLM

    from dynamo_vllm.engine.base import EngineOp, FrameChooser, OnLoad, OnPhase, Sink, SmallPrompts
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.control import Control
    from dynamo_vllm.engine.vllm.direct import Direct
    from dynamo_vllm.engine.vllm.output_socket import Receiver
    from dynamo_vllm.job import AnswerParser, Media
    from dynamo_vllm.wire_openai import ChatBody

logger = logging.getLogger(__name__)
EMBEDS_READERS = 2
"""Prompt embeddings read at a time: each holds its file three times over for a moment."""


class VllmEngine:
    """Starts vLLM, feeds it jobs and turns what it yields into outputs."""

    def __init__(self, settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase) -> None:
        self._settings = settings
        self._on_load = on_load
        self._on_phase = on_phase
        self._llm: AsyncLLM | None = None
        self._direct: Direct | None = None
        self._control: Control | None = None
        self._receiver: Receiver | None = None
        self._relay: EventRelay | None = None
        self._embeds_readers: ThreadPoolExecutor | None = None
        self._encoded: Folder | None = None
        self._guides: GuideGate | None = None
        self._parser: type[Parser] | None = None
        self._first_rank = 0
        self._seen: dict[int, int] = {}
        self.counting = Counting()

    async def start(self) -> EngineFacts:
        self._on_phase("importing")
        vllm_environment.set_environment(self._settings)
        table.apply(Where.WORKER)
        from vllm.v1.engine.async_llm import AsyncLLM

        from dynamo_vllm.engine.vllm import control as vllm_control
        from dynamo_vllm.engine.vllm import direct as vllm_direct
        from dynamo_vllm.engine.vllm import output_socket
        from dynamo_vllm.engine.vllm import stats as vllm_stats
        from dynamo_vllm.engine.vllm.parts import parsing

        resolved = vllm_arguments.resolve(self._settings)
        for fired in resolved.fired:
            logger.info("default %s", fired)
        config = vllm_arguments.create_config(resolved.args, self._settings)
        self._settings.on_resolved(vllm_arguments.described(resolved.args, config))
        self._parser = parsing.parser_class(self._settings, config.model_config)
        self._on_phase(vllm_arguments.loading_phase(config))
        self._relay = relay_for(config, self._settings)
        self._guides = guide_gate(config, self._settings)
        try:
            with core_fork.forked_cores(self._settings.zygote, config):
                self._llm = AsyncLLM.from_vllm_config(
                    config,
                    stat_loggers=vllm_stats.loggers(self._on_load, self._step, self.counting),
                    enable_log_requests=resolved.args.enable_log_requests,
                    disable_log_stats=resolved.args.disable_log_stats,
                )
        except (RuntimeError, ValueError, OSError) as exc:
            raise StartError(f"vLLM did not start: {exc}") from exc
        if self._settings.direct_egress:
            self._receiver = output_socket.Receiver(self._llm.engine_core.resources.output_socket)
            self._direct = vllm_direct.Direct(self._llm)
        self._control = vllm_control.Control(self._llm)
        vllm_environment.keep_environment()
        self._on_phase("cache")
        facts = self._facts(resolved)
        if self._settings.takes_encoded and self._settings.encoder_folder:
            path = Path(self._settings.encoder_folder, facts.encoder)
            self._encoded = Folder(path, self._settings.encoder_folder_bytes)
        return facts

    def _step(self, rank: int) -> None:
        self._seen[rank] = self._seen.get(rank, 0) + 1

    def _facts(self, resolved: vllm_arguments.Resolved) -> EngineFacts:
        from dynamo_vllm.engine.vllm import control as vllm_control
        from dynamo_vllm.engine.vllm import kv_compatibility
        from dynamo_vllm.engine.vllm.parts import media as vllm_media

        llm = self._engine
        config = llm.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        ranks = llm.engine_core.engine_ranks_managed
        self._first_rank, self._seen = ranks[0], dict.fromkeys(ranks, 0)
        endpoints, topic = _kv_events(config, ranks)
        if self._relay is not None:
            endpoints |= self._relay.addresses
        defaults = config.model_config.get_diff_sampling_param()
        return EngineFacts(
            context_length=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=cache.block_size,
            # vLLM adds the blocks of all ranks up; the router wants those of one.
            total_kv_blocks=(cache.num_gpu_blocks or 0) // len(ranks),
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            data_parallel_size=len(ranks),
            data_parallel_start_rank=ranks[0],
            kv_event_endpoints=endpoints,
            kv_event_topic=topic,
            bos_token_id=getattr(config.model_config.hf_config, "bos_token_id", None),
            sampling_defaults={k: v for k, v in defaults.items() if isinstance(v, int | float)},
            versions=machine.versions(),
            rules=[str(fired) for fired in resolved.fired],
            terms=kv_compatibility.terms(config),
            kv_lease_seconds=kv_compatibility.lease_seconds(config),
            adapters=_adapter_limits(config),
            takes_embeds=config.model_config.enable_prompt_embeds,
            media=vllm_media.limits(llm.renderer),
            encoder=kv_compatibility.encoder(config),
            sleep_refusal=_sleep_refusal(config),
            profile_folder=vllm_control.profile_folder(config),
            builds_lazily=True,
            compiles_kernels=machine.device() == "cuda",
        )

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDead("the engine is not running")
        return self._llm

    async def stream(self, job: Job, sink: Sink) -> None:
        if job.sampling.guide is not None and self._guides is not None:
            admitted = await self._guides.admitted(job)
            if admitted is None:
                sink(Output([], finish="abort", finished=True))
                return
            job = admitted
        if job.media is None:
            await self._stream(job, sink)
            return
        from dynamo_vllm.engine.vllm.convert import MediaForgotten

        try:
            await self._stream(job, sink)
        except MediaForgotten:
            logger.info("request %s: its media are sent once more", job.id)
            again = await self.see(job.media.plain, job.media.media)
            job.media.inner = again.inner  # of the same job: with its first token it forgets all of it
            await self._stream(job, sink)

    async def _stream(self, job: Job, sink: Sink) -> None:
        llm, direct = self._engine, self._direct
        if direct is not None and direct.fits(job):
            await direct.stream(job, self._place(job.data_parallel_rank), sink)
            return
        async with contextlib.aclosing(self._outputs(llm, job)) as outputs:
            async for output in outputs:
                sink(output)

    async def _outputs(self, llm: AsyncLLM, job: Job) -> AsyncGenerator[Output, None]:
        """The long way, for whatever needs vLLM's own work on each output."""
        from dynamo_vllm.engine.vllm import convert
        from dynamo_vllm.engine.vllm.control import lora_request
        from dynamo_vllm.engine.vllm.kv_compatibility import refuse_prompt_logprobs

        refuse_prompt_logprobs(llm.vllm_config, job)
        has_begun = False
        try:
            stream = llm.generate(
                convert.engine_input(job),
                convert.sampling_params(job.sampling, job.transfer),
                job.id,
                lora_request=lora_request(job.adapter) if job.adapter else None,
                trace_headers=job.trace_headers,
                priority=job.priority,
                data_parallel_rank=self._place(job.data_parallel_rank),
            )
            async with contextlib.aclosing(stream):
                async for result in stream:
                    for output in convert.outputs(result):
                        if output.finish == "error":
                            raise convert.gave_up(job, has_begun)
                        yield output
                    if job.media is not None and not has_begun:
                        job.media.forget()
                    has_begun = True
        except DynamoVllmError:
            raise
        except Exception as exc:
            raise convert.error(exc, job, has_begun) from exc

    def _place(self, rank: int | None) -> int | None:
        """vLLM counts from the first rank it answers for."""
        return None if rank is None else rank - self._first_rank

    async def abort(self, job_id: str) -> None:
        if self._guides is not None:
            self._guides.leave(job_id)
        if self._llm is not None:
            await self._llm.abort(job_id)

    async def control(self, op: EngineOp) -> int | None:
        if self._control is None:
            raise EngineDead("the engine is not running")
        return await self._control.do(op)

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.check_health()
        except EngineDeadError as exc:
            raise EngineDead(str(exc)) from exc

    def outputs_seen(self) -> Mapping[int, int]:
        return self._seen

    async def vitals(self) -> Mapping[int, Vitals]:
        found: Mapping[int, Vitals] = await in_thread(functools.partial(rank_activity.read, self._engine))
        return found

    def metrics_text(self) -> str:
        own = prometheus.series()
        url = self._settings.connector_metrics_url
        return own + prometheus.fetched(url) if url else own

    async def close(self) -> None:
        llm, self._llm, self._control = self._llm, None, None
        if self._guides is not None:
            self._guides.close()
        if self._embeds_readers is not None:
            self._embeds_readers.shutdown(wait=False, cancel_futures=True)
        if self._receiver is not None:
            self._receiver.close()
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would take this end for a death, and log all of it
            await in_thread(llm.shutdown)
        if self._relay is not None:
            self._relay.close()

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        from vllm.renderers import ChatParams

        params = ChatParams(
            chat_template=options.get("template"), chat_template_kwargs=options.get("kwargs", {})
        )
        renderer = self._engine.renderer
        with _refusing("messages"):
            # vLLM 0.30 looks only once the template's text is tokenised, in the one thread there is for that.
            renderer.default_chat_tok_params.apply_pre_tokenization(
                renderer.get_tokenizer(), {"prompt": "".join(_words(messages))}
            )
            # Not the whole way of `render_chat_async`: media are put into the prompt by `see`.
            _, text = await renderer.render_messages_async(list(messages), params)
            tokens = await renderer.tokenize_prompt_async(text, renderer.default_chat_tok_params)
        return list(tokens["prompt_token_ids"])

    def frame_chooser(self) -> FrameChooser | None:
        from dynamo_vllm.engine.vllm.parts import media as vllm_media

        return vllm_media.frame_chooser(self._engine.vllm_config.model_config)

    async def see(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        from dynamo_vllm.engine.vllm.parts import media as vllm_media

        return await vllm_media.see(self._engine.renderer, prompt, media)

    async def read_encoded(self, name: str) -> Any:
        from dynamo_vllm.engine.encoder_cache import connector as encoder_cache_connector
        from dynamo_vllm.engine.vllm.parts import media as vllm_media

        if self._encoded is None:
            raise Unusable("this engine has no folder to take it from")
        model = self._engine.vllm_config.model_config
        read = functools.partial(self._encoded.read, name, encoder_cache_connector.width(model), model.dtype)
        tensor, about = await asyncio.get_running_loop().run_in_executor(None, read)
        return vllm_media.Encoded(tensor, about)

    async def read_embeds(self, text: str) -> Embeds:
        from dynamo_vllm.engine.vllm.parts import embeds as vllm_embeds

        model = self._engine.vllm_config.model_config
        if self._embeds_readers is None:
            self._embeds_readers = ThreadPoolExecutor(EMBEDS_READERS, "embeds")
        read = functools.partial(
            vllm_embeds.read, text, model.get_inputs_embeds_size(), model.max_model_len - 1, model.dtype
        )
        return await asyncio.get_running_loop().run_in_executor(self._embeds_readers, read)

    def small_prompts(self) -> SmallPrompts:
        from dynamo_vllm.engine.vllm.parts import smallest_prompts

        return smallest_prompts.prompts(self._engine)

    def count_tokens(self, text: str) -> int:
        return len(self._engine.get_tokenizer().encode(text))

    async def render_text(self, prompt: str) -> list[int]:
        with _refusing("prompt"):
            (rendered,) = await self._engine.renderer.render_cmpl_async([{"prompt": prompt}])
        return list(rendered["prompt_token_ids"])

    def answer_parser(self, body: ChatBody, template_wishes: Mapping[str, Any]) -> AnswerParser | None:
        if self._parser is None:
            return None
        from dynamo_vllm.engine.vllm.parts import parsing

        llm = self._engine
        tokenizer, model = llm.get_tokenizer(), llm.vllm_config.model_config
        with _refusing("tools"):
            return parsing.Parsing(self._parser, tokenizer, model, body, template_wishes)


def _words(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What the messages of a chat say."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (text for part in parts if isinstance(text := part.get("text"), str))


@contextlib.contextmanager
def _refusing(parameter: str) -> Iterator[None]:
    """What vLLM's renderer refuses is refused with the name of the field it came from."""
    from dynamo_vllm.engine.vllm import convert

    try:
        yield
    except DynamoVllmError:
        raise
    except Exception as exc:
        found = convert.error(exc)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(str(found), parameter=parameter) from exc
        raise found from exc


def _adapter_limits(config: Any) -> AdapterLimits | None:
    lora = config.lora_config
    if lora is None:
        return None
    if machine.device() == "cpu":
        # vLLM 0.30: when every slot holds an adapter, a request without one gets an adapter's output.
        return AdapterLimits(lora.max_loras - 1, lora.max_lora_rank)
    return AdapterLimits(lora.max_cpu_loras or lora.max_loras, lora.max_lora_rank)


def _sleep_refusal(config: Any) -> str | None:
    if config.kv_transfer_config is not None:
        return "its KV cache is registered with other engines, which sleep would pull away; stop it instead"
    if machine.device() == "cpu" or config.model_config.enable_sleep_mode:
        return None
    return "start it with --enable-sleep-mode, or use pause, which keeps the memory"


def _kv_events(config: Any, ranks: Iterable[int], host: str = "127.0.0.1") -> tuple[dict[int, str], str]:
    """The address of each rank's events at `host`, and their topic."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return {}, ""
    from vllm.distributed.kv_events import ZmqEventPublisher

    if merged := _merged_events(config):
        return {next(iter(ranks)): merged}, ""
    endpoints = {}
    for rank in ranks:
        bound = ZmqEventPublisher.offset_endpoint_port(events.endpoint, rank)
        endpoints[rank] = heard_at(bound, host)
    return endpoints, events.topic


def _merged_events(config: Any) -> str | None:
    """Where a connector publishes vLLM's events, which it hears, together with its own."""
    more = config.additional_config
    merged = more.get("consolidator_endpoints") if isinstance(more, dict) else None
    return str(merged[2]) if merged else None


def relay_for(config: Any, settings: EngineSettings) -> EventRelay | None:
    """Listens for the ranks on other nodes, which connect to this one."""
    if _merged_events(config):
        return None
    listen, _ = _kv_events(config, settings.node.remote_ranks, settings.node.leader)
    return EventRelay(listen, settings.scratch_folder) if listen else None


def guide_gate(config: Any, settings: EngineSettings) -> GuideGate:
    """Its processes load the tokenizer while the engine loads the model."""
    from dynamo_vllm.engine.structured_output import vllm_grammars

    limits = Limits(settings.guide_seconds, settings.guide_memory_bytes)
    return GuideGate.opened(
        vllm_grammars.LOAD,
        vllm_grammars.payload(config),
        limits,
        settings.zygote,
        at_once=settings.takes_guides and not settings.headless,
    )
