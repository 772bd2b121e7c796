"""vLLM's AsyncLLM behind the Engine protocol."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine import prometheus, vllm_start
from dynamo_vllm.errors import DynamoVllmError, EngineDead, InvalidRequest, StartError
from dynamo_vllm.job import EngineFacts, Job, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

    from dynamo_vllm.engine.base import OnLoad, OnPhase
    from dynamo_vllm.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class VllmEngine:
    """Starts vLLM, feeds it jobs and turns what it yields into outputs."""

    def __init__(self, settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase) -> None:
        self._settings = settings
        self._on_load = on_load
        self._on_phase = on_phase
        self._llm: AsyncLLM | None = None
        self._seen = 0

    async def start(self) -> EngineFacts:
        self._on_phase("importing")
        vllm_start.set_environment(self._settings)
        from vllm.v1.engine.async_llm import AsyncLLM

        from dynamo_vllm.engine import vllm_stats

        resolved = vllm_start.resolve(self._settings)
        for fired in resolved.fired:
            logger.info("default %s", fired)
        config = vllm_start.create_config(resolved.args, self._settings)
        self._on_phase("loading")
        try:
            self._llm = AsyncLLM.from_vllm_config(
                config,
                stat_loggers=[vllm_stats.load_logger(self._on_load, self._step)],
                enable_log_requests=resolved.args.enable_log_requests,
                disable_log_stats=resolved.args.disable_log_stats,
            )
        except (RuntimeError, ValueError, OSError) as exc:
            raise StartError(f"vLLM did not start: {exc}") from exc
        self._on_phase("cache")
        return self._facts(resolved)

    def _step(self) -> None:
        self._seen += 1

    def _facts(self, resolved: vllm_start.Resolved) -> EngineFacts:
        from dynamo_vllm.engine import vllm_terms

        llm = self._engine
        config = llm.vllm_config
        cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
        endpoints, topic = _kv_events(config)
        defaults = config.model_config.get_diff_sampling_param()
        return EngineFacts(
            context_length=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=cache.block_size,
            # vLLM adds the blocks of all ranks up; the router wants those of one.
            total_kv_blocks=(cache.num_gpu_blocks or 0) // parallel.data_parallel_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_start_rank=parallel.data_parallel_rank,
            kv_event_endpoints=endpoints,
            kv_event_topic=topic,
            bos_token_id=getattr(config.model_config.hf_config, "bos_token_id", None),
            sampling_defaults={k: v for k, v in defaults.items() if isinstance(v, int | float)},
            versions=vllm_start.versions(),
            rules=[str(fired) for fired in resolved.fired],
            terms=vllm_terms.terms(config),
            kv_lease_seconds=vllm_terms.lease_seconds(config),
        )

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDead("the engine is not running")
        return self._llm

    async def generate(self, job: Job) -> AsyncGenerator[Output, None]:
        from dynamo_vllm.engine import vllm_convert as convert

        has_begun = False
        try:
            stream = self._engine.generate(
                convert.engine_input(job),
                convert.sampling_params(job.sampling, job.transfer),
                job.id,
                priority=job.priority,
                data_parallel_rank=job.data_parallel_rank,
            )
            async with contextlib.aclosing(stream):
                async for result in stream:
                    has_begun = True
                    for output in convert.outputs(result):
                        if output.finish == "error":
                            raise convert.gave_up(job)
                        yield output
        except DynamoVllmError:
            raise
        except Exception as exc:
            raise convert.error(exc, job, has_begun) from exc

    async def abort(self, job_id: str) -> None:
        if self._llm is not None:
            await self._llm.abort(job_id)

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.check_health()
        except EngineDeadError as exc:
            raise EngineDead(str(exc)) from exc

    def outputs_seen(self) -> int:
        return self._seen

    def metrics_text(self) -> str:
        own = prometheus.series()
        url = self._settings.connector_metrics_url
        return own + prometheus.fetched(url) if url else own

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        from vllm.renderers import ChatParams

        params = ChatParams(
            chat_template=options.get("template"), chat_template_kwargs=options.get("kwargs", {})
        )
        with _refusing("messages"):
            _, (rendered,) = await self._engine.renderer.render_chat_async([list(messages)], params)
        return list(rendered["prompt_token_ids"])

    async def render_text(self, prompt: str) -> list[int]:
        with _refusing("prompt"):
            (rendered,) = await self._engine.renderer.render_cmpl_async([{"prompt": prompt}])
        return list(rendered["prompt_token_ids"])


@contextlib.contextmanager
def _refusing(parameter: str) -> Iterator[None]:
    """What vLLM's renderer refuses is refused with the name of the field it came from."""
    from dynamo_vllm.engine import vllm_convert as convert

    try:
        yield
    except Exception as exc:
        found = convert.error(exc)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(str(found), parameter=parameter) from exc
        raise found from exc


def _kv_events(config: Any) -> tuple[dict[int, str], str]:
    """Where each rank's events can be heard, and under which topic."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return {}, ""
    from vllm.distributed.kv_events import ZmqEventPublisher

    first = config.parallel_config.data_parallel_rank
    more = config.additional_config
    if isinstance(more, dict) and (merged := more.get("consolidator_endpoints")):
        return {first: merged[2]}, ""  # a connector hears vLLM's events there and publishes them with its own
    endpoints = {}
    for rank in range(first, first + config.parallel_config.data_parallel_size):
        bound = ZmqEventPublisher.offset_endpoint_port(events.endpoint, rank)
        endpoints[rank] = bound.replace("*", "127.0.0.1").replace("[::]", "127.0.0.1")
    return endpoints, events.topic
