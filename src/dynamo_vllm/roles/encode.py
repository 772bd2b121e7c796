"""The encode role: runs the vision encoder on a request's media and returns the names of its output.

The output goes into a folder (`engine.encoder_cache.folder`) that the calling workers have too. Existing
output is not encoded again, whoever encoded it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dynamo_vllm import wire
from dynamo_vllm.codec import prompt
from dynamo_vllm.config.role_cards import CARDS
from dynamo_vllm.errors import InvalidRequest, MediaRefused, MediaTooLarge, MediaTypeUnknown, TooLong
from dynamo_vllm.job import Job, Output, SamplingSpec
from dynamo_vllm.roles import media, trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.engine.encoder_cache.folder import Folder
    from dynamo_vllm.errors import RequestError
    from dynamo_vllm.job import Adapter, EngineFacts, Media
    from dynamo_vllm.media.base import MediaRef
    from dynamo_vllm.wire import Chunk

logger = logging.getLogger(__name__)
# Not listed: the frontend need not know it. Workers find it by its address.
CARD = CARDS["encode"]


class EncodedMedium(msgspec.Struct, frozen=True):
    """One encoded media item."""

    kind: str
    name: str
    """Hash of its content and the request's cache salt; also the file's name."""


class Handoff(msgspec.Struct, frozen=True):
    """The answer of an encode worker; `disaggregated_params` of its last chunk."""

    encoded: list[EncodedMedium]


class Refusal(msgspec.Struct, frozen=True):
    """The answer to media that are the client's fault: under `refused`, instead of the names."""

    status: Literal[400, 413, 415]
    message: str
    parameter: str | None = None
    context_length: int | None = None
    """The encode worker's limit, if the prompt with its media is longer."""

    def error(self) -> RequestError:
        """What the encode worker raised, for the client of the calling worker."""
        kind = _REFUSED[self.status] if self.context_length is None else TooLong
        return kind(self.message, parameter=self.parameter)


_REFUSED: dict[int, type[RequestError]] = {
    kind.status: kind for kind in (MediaRefused, MediaTooLarge, MediaTypeUnknown)
}


def parse_answer(answer: Any) -> Handoff | Refusal:
    """Parse an encode worker's answer. Raises msgspec.ValidationError, LookupError or TypeError for an
    invalid one.

    An older worker that does not know refusals misses `encoded`, and treats the encode worker as lost.
    """
    if "refused" in answer:
        return msgspec.convert(answer["refused"], Refusal)
    return msgspec.convert(answer, Handoff)


def request(
    ids: Sequence[int], refs: Sequence[MediaRef], salt: str | None, model: str | None = None
) -> dict[str, Any]:
    """Build the request to an encode worker: the worker's own request without what concerns the answer."""
    parts: dict[str, list[dict[str, str]]] = {}
    for ref in refs:
        parts.setdefault(media.KEYS[ref.kind], []).append({"Url": ref.url})
    return {
        "model": model,
        "token_ids": list(ids),
        "multi_modal_data": parts,
        "routing": {"cache_salt": salt},
        "stop_conditions": {},
        "sampling_options": {},
        "output_options": {},
    }


class Encode:
    card = CARD

    def __init__(self, facts: EngineFacts, reader: media.MediaReader, folder: Folder | None) -> None:
        self._facts = facts
        self._media = reader
        self._folder = folder

    def parse(self, raw: object) -> wire.GenerateRequest:
        return wire.parse(raw)

    def adapter(self, request: wire.GenerateRequest) -> str | None:
        return None

    async def prepare(
        self, request: wire.GenerateRequest, job_id: str, adapter: Adapter | None = None
    ) -> Job:
        ids: Sequence[int] = request.token_ids
        prompt.check_ids(ids, self._facts.vocab_size)
        prompt.room_after(ids, self._facts.context_length)
        refs = media.of_tokens(request)
        if not refs:
            if request.is_health_check:
                return Job(job_id, ids, _NOTHING)
            raise InvalidRequest("an encode worker needs media, and there are none", parameter="messages")
        salt = request.routing.cache_salt if request.routing else None
        self._media.refuse(refs)  # due to how this worker was started, which is not the client's fault
        try:
            found = await self._media.load(refs, salt)
            if self._folder is not None and all(self._folder.has(medium.name) for medium in found):
                return Job(job_id, ids, _NOTHING, answer=_answer(_handoff(found)))
            logger.debug("request %s: %d media to encode", job_id, len(found))
            media_prompt = await self._media.put_into_prompt(ids, found)
            prompt.room_after(media_prompt.tokens, self._facts.context_length)
        except (MediaRefused, InvalidRequest, TooLong) as exc:
            logger.debug("request %s: refused: %s", job_id, exc)
            limit = self._facts.context_length if isinstance(exc, TooLong) else None
            return Job(job_id, ids, _NOTHING, answer=_answer(_refusal(exc, limit)))
        return Job(job_id, media_prompt.tokens, _NOTHING, media=media_prompt)

    def encoder(self, request: wire.GenerateRequest, job: Job) -> EncodeEncoder:
        return EncodeEncoder([] if job.media is None else job.media.media)

    def health_check(self) -> dict[str, object]:
        """Text alone: it shows that the engine answers. The placeholders of media depend on the model."""
        token = self._facts.bos_token_id
        return {"token_ids": [token if token is not None else 1], "_HEALTH_CHECK": True}

    def trials(self, given: trials.TrialInputs) -> trials.Trials:
        plain = trials.Trial("text", self.health_check())
        return trials.Trials(plain, tuple(trials.media_trials(self._facts, given)))


_NOTHING = SamplingSpec(max_tokens=1, temperature=0.0)
"""An encode worker generates no token."""


def _answer(answer: dict[str, object]) -> Output:
    return Output([], finish="stop", finished=True, transfer=answer)


def _handoff(found: Sequence[Media]) -> dict[str, object]:
    made: dict[str, object] = msgspec.to_builtins(Handoff([EncodedMedium(m.kind, m.name) for m in found]))
    return made


def _refusal(exc: RequestError, context_length: int | None) -> dict[str, object]:
    answer = {"status": exc.status, "message": exc.args[0], "parameter": exc.parameter}
    return {"refused": {**answer, "context_length": context_length}}


class EncodeEncoder:
    """The last chunk carries the names."""

    def __init__(self, found: Sequence[Media]) -> None:
        self._handoff = _handoff(found)

    def encode(self, output: Output) -> Chunk:
        chunk: Chunk = {"token_ids": output.token_ids, "index": output.index}
        if output.finished:
            chunk["finish_reason"] = output.finish
            chunk["disaggregated_params"] = output.transfer or self._handoff
        return chunk
