"""Implements the Engine protocol with vLLM-Omni's AsyncOmni: pipelines of text and drawing stages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine import machine
from dynamo_vllm.engine.base import Counting, LoadFigures, SmallPrompts
from dynamo_vllm.engine.omni import arguments as omni_arguments
from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.patches import plugin, table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.process import prometheus
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.errors import (
    DynamoVllmError,
    EngineDead,
    EngineRequestFailed,
    InvalidRequest,
    StartError,
    WrongState,
)
from dynamo_vllm.job import Embeds, EngineFacts, Job, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from vllm_omni.entrypoints.async_omni import AsyncOmni

    from dynamo_vllm.engine.base import EngineOp, FrameChooser, OnLoad, OnPhase, Sink
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.job import Media, MediaPrompt

logger = logging.getLogger(__name__)
TELL_SECONDS = 10.0
"""Between words about a long start."""
BOS_SECONDS = 5.0
PATIENCE_SECONDS = 600.0
"""How long one drawing may take before silence counts as a hang: a pipeline says nothing between steps."""
ABORT_SECONDS = 5.0
DEAD_SECONDS = 1.0
"""For the stages that live on when one died; they end with this process anyway."""
_WITNESSES = ("canary-", "warm-up")
"""Jobs of our own that must answer soon; they are no excuse for silence."""


class OmniEngine:
    """Starts a pipeline, feeds it jobs and turns what its stages yield into outputs."""

    def __init__(self, settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase) -> None:
        self._settings = settings
        self._on_load = on_load
        self._on_phase = on_phase
        self._omni: AsyncOmni | None = None
        self._tokenizer: Any = None
        self._sample_rate: int | None = None
        self._is_dead = False
        self._running: set[str] = set()
        self._drawing: set[str] = set()
        """Drawings of clients: silence is no hang while they run."""
        self._aborted: set[str] = set()
        self._outputs = 0
        self._tokens = 0
        self._moved_at = 0.0
        """When a drawing last gave something, or the first of those that wait came."""
        self.counting = Counting()

    async def start(self) -> EngineFacts:
        self._on_phase("importing")
        omni_arguments.refuse_missing()
        omni_arguments.set_environment(self._settings, omni_pipelines.choose(self._settings.model))
        omni = await self._told("importing vLLM-Omni", _imported)
        plugin.register_omni()
        table.apply(Where.OMNI_WORKER)
        pipeline = omni_pipelines.resolve(self._settings.model)
        omni_pipelines.register(pipeline)
        given = omni_arguments.arguments(self._settings, pipeline, self._settings.scratch_folder)
        self._on_phase("loading")
        try:
            self._omni = await self._told("loading the stages", lambda: omni(**given))
        except (RuntimeError, ValueError, TypeError, KeyError, OSError) as exc:
            raise StartError(f"vLLM-Omni did not start: {_reason(exc)}") from exc
        self._engine.log_stats = False  # series stay; without this a table per request goes into the log
        self._on_phase("cache")
        return await self._facts()

    async def _told(self, what: str, work: Callable[[], Any]) -> Any:
        """A blocking step in a thread of its own, with a word now and then."""
        began = time.monotonic()
        task = in_thread(work)
        while not task.done():
            await asyncio.wait({task}, timeout=TELL_SECONDS)
            if not task.done():
                logger.info("%s for %.0f s", what, time.monotonic() - began)
        return task.result()

    async def _facts(self) -> EngineFacts:
        omni = self._engine
        call = await asyncio.to_thread(omni_arguments.call_arguments, self._settings.model)
        limits = omni_arguments.picture_limits(self._settings.model, omni.output_modalities, call)
        if limits is not None:
            self._sample_rate = limits.sample_rate
            self._tokenizer = await asyncio.to_thread(_tokenizer_beside, self._settings.model)
        bos = await self._bos()
        config = omni.vllm_config
        if config is None:
            return EngineFacts(
                # Of no meaning where nothing is written; a card needs some.
                context_length=1,
                vocab_size=1,
                block_size=16,
                total_kv_blocks=1,
                max_num_seqs=1,
                max_num_batched_tokens=1,
                versions=machine.versions(),
                pictures=limits,
                sleep_refusal=_NO_SLEEP,
            )
        defaults = config.model_config.get_diff_sampling_param()
        return EngineFacts(
            context_length=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=config.cache_config.block_size,
            total_kv_blocks=config.cache_config.num_gpu_blocks or 1,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            bos_token_id=bos,
            sampling_defaults={k: v for k, v in defaults.items() if isinstance(v, int | float)},
            versions=machine.versions(),
            pictures=limits,
            sleep_refusal=_NO_SLEEP,
        )

    async def _bos(self) -> int | None:
        """The first token of a health check; the role has one of its own where a pipeline knows none."""
        try:
            async with asyncio.timeout(BOS_SECONDS):
                tokenizer = await self._engine.get_tokenizer()
        except Exception as exc:  # a pipeline that only draws has none, and says so in several ways
            logger.debug("no tokenizer in this pipeline: %s", exc)
            return None
        found = getattr(tokenizer, "bos_token_id", None)
        return found if isinstance(found, int) else None

    @property
    def _engine(self) -> AsyncOmni:
        if self._omni is None:
            raise EngineDead("the engine is not running")
        return self._omni

    def count_tokens(self, text: str) -> int:
        """As the drawing stage counts."""
        return len(self._tokenizer(text).input_ids) if self._tokenizer is not None else 0

    async def stream(self, job: Job, sink: Sink) -> None:
        outputs = self._written(job) if job.picture is None else self._drawn(job)
        self._running.add(job.id)
        if job.picture is not None and not job.id.startswith(_WITNESSES):
            if not self._drawing:
                self._moved_at = time.monotonic()
            self._drawing.add(job.id)
        self._report()
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._outputs += 1
                    self._tokens += len(output.token_ids)
                    self._moved_at = time.monotonic()
                    sink(output)
        finally:
            self._running.discard(job.id)
            self._drawing.discard(job.id)
            self._aborted.discard(job.id)
            self._report()

    async def _written(self, job: Job) -> AsyncGenerator[Output, None]:
        """The text of a pipeline; what its later stages would say or draw is not asked for."""
        if job.sampling.n > 1:
            raise InvalidRequest("a pipeline of vLLM-Omni gives one choice", parameter="n")
        from dynamo_vllm.engine.omni import convert as omni_convert
        from dynamo_vllm.engine.vllm import convert

        prompt: dict[str, Any] = {"prompt_token_ids": list(job.prompt)}
        if job.cache_salt:
            prompt["cache_salt"] = job.cache_salt
        later = list(self._engine.default_sampling_params_list)[1:]
        has_ended = False
        async for result in self._results(
            job, prompt, lambda: [convert.sampling_params(job.sampling), *later], ["text"] if later else None
        ):
            omni_convert.refuse_failed(result)
            for output in convert.outputs(result):
                if output.finish == "error":
                    raise convert.gave_up(job)
                has_ended = has_ended or output.finished
                yield output
        if job.id in self._aborted and not has_ended:
            yield Output((), finish="abort", finished=True)
        elif not has_ended:
            # The frontend shows a stream without an end as a whole answer.
            raise EngineRequestFailed("the pipeline ended without finishing its text")

    async def _drawn(self, job: Job) -> AsyncGenerator[Output, None]:
        """Texts of the stages before, then everything that was drawn in one output."""
        from dynamo_vllm.engine.omni import convert

        spec = job.picture
        assert spec is not None
        defaults = self._engine.default_sampling_params_list
        made: list[Any] = []
        async for result in self._results(
            job, convert.prompt(spec), lambda: convert.stage_params(spec, defaults)
        ):
            convert.refuse_failed(result)
            if convert.is_aborted(result):
                yield Output((), finish="abort", finished=True)
                return
            made += await asyncio.to_thread(convert.media_of, result, spec, self._sample_rate)
            if result.final_output_type == "text" and (text := convert.text_of(result)) is not None:
                yield text
        if job.id in self._aborted:
            # vLLM-Omni 0.30 ends an aborted drawing as if it had come to its end, without a picture.
            yield Output((), finish="abort", finished=True)
            return
        if not made:
            raise EngineRequestFailed("the pipeline ended without making anything")
        yield Output((), finish="stop", finished=True, media=made)

    async def _results(
        self,
        job: Job,
        prompt: dict[str, Any],
        params: Callable[[], list[Any]],
        wanted: list[str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """What vLLM-Omni yields; `params` makes one entry per stage, and may refuse.

        `wanted` leaves out the stages whose kind of output it does not name.
        """
        from dynamo_vllm.engine.vllm import convert

        has_begun = False
        try:
            stream = self._engine.generate(
                prompt,
                request_id=job.id,
                sampling_params_list=params(),
                output_modalities=wanted,
                priority=job.priority,
            )
            async with contextlib.aclosing(stream):
                async for result in stream:
                    has_begun = True
                    yield result
        except DynamoVllmError:
            raise
        except Exception as exc:
            found = convert.error(exc, job, has_begun)
            self._is_dead = self._is_dead or isinstance(found, EngineDead)
            raise found from exc

    def _report(self) -> None:
        self._on_load(LoadFigures(0, len(self._running), 0, 0.0, self._tokens))

    async def abort(self, job_id: str) -> None:
        if job_id not in self._running or self._omni is None:
            return
        self._aborted.add(job_id)
        with contextlib.suppress(TimeoutError):  # a stage that hangs; the monitor sees to it
            await self._omni.abort(job_id, timeout=ABORT_SECONDS)

    async def control(self, op: EngineOp) -> int | None:
        raise WrongState(
            f"{type(op).__name__.lower()}: a pipeline of vLLM-Omni cannot; drain or stop the worker"
        )

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.check_health()
        except EngineDeadError as exc:
            self._is_dead = True
            raise EngineDead(str(exc)) from exc

    def outputs_seen(self) -> Mapping[int, int]:
        """Time itself counts while clients' drawings are on their way, for as long as we are patient.

        Since the last output, not since each came: with new clients all the time a hang would never show.
        """
        if self._drawing and time.monotonic() - self._moved_at < PATIENCE_SECONDS:
            self._outputs += 1
        return {0: self._outputs}

    async def vitals(self) -> Mapping[int, Vitals]:
        """Which stage works in which thread is not known; long drawings have `outputs_seen`."""
        return {}

    def metrics_text(self) -> str:
        return prometheus.series()

    async def close(self) -> None:
        omni, self._omni = self._omni, None
        if omni is not None:
            # vLLM-Omni 0.30 gives the stages that are left half a minute when one has died.
            limit = DEAD_SECONDS if self._is_dead else None
            await asyncio.wait({in_thread(omni.shutdown)}, timeout=limit)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        from vllm.renderers import ChatParams

        params = ChatParams(
            chat_template=options.get("template"), chat_template_kwargs=options.get("kwargs", {})
        )
        _, (rendered,) = await self._rendering(
            "messages", lambda r: r.render_chat_async([list(messages)], params)
        )
        return list(rendered["prompt_token_ids"])

    async def render_text(self, prompt: str) -> list[int]:
        (rendered,) = await self._rendering("prompt", lambda r: r.render_cmpl_async([{"prompt": prompt}]))
        return list(rendered["prompt_token_ids"])

    def answer_parser(self, body: object, template_wishes: object) -> None:
        return None  # a rule refuses parsers

    async def _rendering(self, parameter: str, step: Callable[[Any], Any]) -> Any:
        from dynamo_vllm.engine.vllm import convert

        try:
            return await step(self._engine.renderer)
        except Exception as exc:
            found = convert.error(exc)
            if isinstance(found, InvalidRequest):
                raise InvalidRequest(str(found), parameter=parameter) from exc
            raise found from exc

    def frame_chooser(self) -> FrameChooser | None:
        return None

    async def see(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        raise InvalidRequest("a pipeline of vLLM-Omni takes text only", parameter="messages")

    def small_prompts(self) -> SmallPrompts:
        return SmallPrompts({})

    async def read_encoded(self, name: str) -> Any:
        raise InvalidRequest("a pipeline of vLLM-Omni takes text only", parameter="messages")

    async def read_embeds(self, text: str) -> Embeds:
        raise InvalidRequest("a pipeline of vLLM-Omni takes no vectors", parameter="prompt_embeds")


_NO_SLEEP = "a pipeline of vLLM-Omni does not sleep; stop it instead"


def _imported() -> Any:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    return AsyncOmni


def _tokenizer_beside(model: str) -> Any:
    """The drawing stage's own; None where the folder has none we can read."""
    from transformers import AutoTokenizer

    folder = Path(model, omni_arguments.tokenizer_folder(model))
    if not folder.is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as exc:  # a missing library, a file of another version: transformers has many ways
        logger.warning("prompts are not counted, the tokenizer cannot be read: %s", exc)
        return None


def _reason(exc: BaseException) -> str:
    """The innermost cause: vLLM-Omni wraps what a stage says several times."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:4]) or type(exc).__name__
