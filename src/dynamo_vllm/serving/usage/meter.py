"""Counts the tokens of one request, and records them when it ends, however it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm import wire
from dynamo_vllm.serving.usage.record import ABORTED, FAILED, FINISHED, METADATA, MOVED, UsageRecord, admitted

if TYPE_CHECKING:
    from dynamo_vllm.engine.base import Sink
    from dynamo_vllm.job import Job, Output
    from dynamo_vllm.serving.request.cancel import Watch
    from dynamo_vllm.serving.usage.record import Admitted


class TakesRecords(Protocol):
    def add(self, record: UsageRecord) -> None: ...


class Meter:
    """One per worker."""

    def __init__(self, reporter: TakesRecords, model: str, *, only_prompts: bool = False) -> None:
        self._reporter = reporter
        self._model = model
        self._only_prompts = only_prompts

    def begin(self, context: Any, request: object, job: Job) -> Count | None:
        """Return a count for a request that a gateway let in; None for any other."""
        who = admitted(context.metadata.get(METADATA))
        if who is None:
            return None
        total = job.prompt_tokens
        prompt = wire.prompt_length(request, total) if isinstance(request, wire.GenerateRequest) else total
        model = job.adapter.name if job.adapter is not None else self._model
        return Count(self._reporter, who, context.id(), model, prompt, total - prompt, self._only_prompts)


class Count:
    """The tokens of one job."""

    __slots__ = (
        "_begun",
        "_cached",
        "_is_recorded",
        "_only_prompts",
        "_part",
        "_prompt",
        "_reporter",
        "_who",
        "model",
        "tokens",
    )

    def __init__(
        self,
        reporter: TakesRecords,
        who: Admitted,
        part: str,
        model: str,
        prompt: int,
        begun: int,
        only_prompts: bool,
    ) -> None:
        self._reporter = reporter
        self._who = who
        self._part = part
        self.model = model
        self._prompt = prompt
        self._begun = begun
        """Tokens of the answer that another worker generated."""
        self._cached = 0
        self._only_prompts = only_prompts
        self._is_recorded = False
        self.tokens = 0

    def around(self, sink: Sink) -> Sink:
        """Count what goes to `sink`. The record comes before the last token does."""

        def counted(output: Output) -> None:
            self.tokens += len(output.token_ids)
            if output.cached_tokens is not None:
                self._cached = min(output.cached_tokens, self._prompt)
            if output.finished and output.finish != "abort":
                self._record(FINISHED)
            sink(output)

        return counted

    def end(self, watch: Watch) -> None:
        """Record a request that has not finished; does nothing for one that has."""
        self._record(MOVED if watch.must_move else ABORTED if watch.client_left else FAILED)

    def _record(self, outcome: str) -> None:
        if self._is_recorded:
            return
        self._is_recorded = True
        if self._only_prompts and outcome != ABORTED:  # the worker that generates the answer counts it all
            return
        self._reporter.add(
            UsageRecord(
                request_id=self._who.request_id,
                part=self._part,
                key_id=self._who.key_id,
                ledger_id=self._who.ledger_id,
                model=self.model,
                prompt_tokens=self._prompt,
                cached_tokens=self._cached,
                completion_tokens=0 if self._only_prompts else self._begun + self.tokens,
                outcome=outcome,
                at=time.time(),
            )
        )
