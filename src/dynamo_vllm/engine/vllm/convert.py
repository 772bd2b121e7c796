"""Converts between our jobs and vLLM's types. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_vllm.errors import (
    DynamoVllmError,
    EngineDead,
    EngineOverloaded,
    EngineRequestFailed,
    InvalidRequest,
    UnknownModel,
)
from dynamo_vllm.job import Embeds, Guide, Job, Output, Position, SamplingSpec, TokenLogprob

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

_DEFAULTS = SamplingParams()
LOWEST_LOGPROB = -9999.0
"""The lower limit of vLLM's own server: a guide gives forbidden tokens -inf, which JSON cannot express."""


def sampling_params(spec: SamplingSpec, transfer: Mapping[str, object] | None = None) -> SamplingParams:
    """Returns vLLM's sampling parameters; fields that are None keep vLLM's defaults."""
    return SamplingParams(
        n=spec.n,
        temperature=_DEFAULTS.temperature if spec.temperature is None else spec.temperature,
        top_p=_DEFAULTS.top_p if spec.top_p is None else spec.top_p,
        top_k=_DEFAULTS.top_k if spec.top_k is None else max(spec.top_k, 0),  # -1 and 0 both mean all tokens
        min_p=_DEFAULTS.min_p if spec.min_p is None else spec.min_p,
        presence_penalty=(
            _DEFAULTS.presence_penalty if spec.presence_penalty is None else spec.presence_penalty
        ),
        frequency_penalty=(
            _DEFAULTS.frequency_penalty if spec.frequency_penalty is None else spec.frequency_penalty
        ),
        repetition_penalty=(
            _DEFAULTS.repetition_penalty if spec.repetition_penalty is None else spec.repetition_penalty
        ),
        seed=spec.seed,
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop=list(spec.stop),
        stop_token_ids=list(spec.stop_token_ids),
        ignore_eos=spec.ignore_eos,
        include_stop_str_in_output=spec.include_stop_in_output,
        skip_special_tokens=spec.skip_special_tokens,
        detokenize=spec.detokenize,
        structured_outputs=None if spec.guide is None else structured_outputs(spec.guide),
        thinking_token_budget=spec.max_thinking_tokens,
        logit_bias=dict(spec.logit_bias) if spec.logit_bias else None,
        extra_args=None if transfer is None else {"kv_transfer_params": dict(transfer)},
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def structured_outputs(guide: Guide) -> StructuredOutputsParams:
    """Converts a guide to vLLM's parameters, with the backend that the guide checker chose."""
    made = StructuredOutputsParams(
        json=dict(guide.json) if isinstance(guide.json, Mapping) else guide.json,
        json_object=guide.json_object,
        regex=guide.regex,
        choice=list(guide.choice) if guide.choice is not None else None,
        grammar=guide.grammar,
        structural_tag=guide.structural_tag,
        whitespace_pattern=guide.whitespace_pattern,
    )
    made._backend = guide.backend
    return made


def engine_input(job: Job) -> dict[str, Any]:
    """Returns the prompt in the form that vLLM does not render again."""
    if job.media is not None:
        made = dict(job.media.inner)
    else:
        made = _token_input(job) if job.embeds is None else _embeds_input(job, job.embeds)
    if job.cache_salt:
        made["cache_salt"] = made.get("cache_salt", "") + job.cache_salt
    return made


def _token_input(job: Job) -> dict[str, object]:
    return {"type": "token", "prompt_token_ids": job.prompt}


def _embeds_input(job: Job, embeds: Embeds) -> dict[str, object]:
    """Returns rows for the prompt, followed by tokens if another worker started the answer (migration)."""
    tensor, answered = embeds.tensor, len(job.prompt) - embeds.rows
    made: dict[str, object] = {"type": "embeds", "prompt_embeds": tensor}
    if answered:
        made["prompt_embeds"] = torch.cat([tensor, tensor.new_zeros(answered, tensor.shape[1])])
        # vLLM 0.30: the hash of a block does not distinguish a token from a row of zeros.
        made["cache_salt"] = job.id
    elif (job.transfer or {}).get("do_remote_decode"):
        # vLLM 0.30: for hybrid models NIXL shortens only the ids, not the rows, which crashes the engine.
        return made
    # vLLM 0.30: without ids a repetition penalty uses those that another request left in the batch.
    made["prompt_token_ids"] = job.prompt
    made["is_token_ids"] = [False] * embeds.rows + [True] * answered
    return made


def outputs(result: RequestOutput) -> Iterator[Output]:
    """Yields one Output per choice that got tokens in this step."""
    choices = result.outputs
    last = len(choices) - 1
    for at, choice in enumerate(choices):
        ended = result.finished and at == last
        yield Output(
            token_ids=_ids(choice),
            index=choice.index,
            text=choice.text,
            finish=choice.finish_reason,
            stop_reason=choice.stop_reason,
            finished=ended,
            cached_tokens=result.num_cached_tokens if ended else None,
            logprobs=_positions(choice.token_ids, choice.logprobs) if choice.logprobs else None,
            prompt_logprobs=_prompt_positions(result) if at == 0 and result.prompt_logprobs else None,
            transfer=result.kv_transfer_params if ended else None,
        )


def _ids(choice: CompletionOutput) -> list[int]:
    ids = choice.token_ids
    return ids if isinstance(ids, list) else list(ids)


def _positions(ids: Sequence[int], logprobs: Sequence[Mapping[int, object]]) -> list[Position]:
    return [_position(token, at) for token, at in zip(ids, logprobs, strict=True)]


def _position(token: int, at: Mapping[int, Any]) -> Position:
    candidates = [
        TokenLogprob(i, max(LOWEST_LOGPROB, lp.logprob), lp.rank, lp.decoded_token) for i, lp in at.items()
    ]
    chosen = next(c for c in candidates if c.token_id == token)
    return Position(chosen, candidates)


def _prompt_positions(result: RequestOutput) -> list[Position | None]:
    ids, logprobs = result.prompt_token_ids or [], result.prompt_logprobs or []
    return [None if at is None else _position(token, at) for token, at in zip(ids, logprobs, strict=True)]


class MediaEvicted(EngineRequestFailed):
    """Is raised if the engine core has evicted media from its cache that we sent without content."""


def error_without_exception(job: Job, has_begun: bool = False) -> DynamoVllmError:
    """Returns our error for a request that vLLM ended with finish reason "error" and no exception.

    vLLM does so for a grammar that it cannot compile, for example.
    """
    if job.media is not None and job.sampling.guide is None and not has_begun:
        return MediaEvicted("the engine has evicted the request's media")
    if job.sampling.guide is not None:
        why = "takes the engine too long for each token" if has_begun else "the engine cannot compile it"
        return InvalidRequest(why, parameter=job.sampling.guide.parameter)
    return EngineRequestFailed("the engine ended the request with an error")


def error(exc: Exception, job: Job | None = None, has_begun: bool = False) -> DynamoVllmError:
    """Returns our error for an exception of vLLM; after the first output the client is not at fault."""
    found = _error(exc)
    if has_begun and isinstance(found, InvalidRequest):
        return EngineRequestFailed(f"{type(exc).__name__}: {exc}")
    guide = job.sampling.guide if job is not None else None
    if isinstance(found, InvalidRequest) and found.parameter is None and guide is not None:
        return InvalidRequest(str(found), parameter=guide.parameter)
    return found


def _error(exc: Exception) -> DynamoVllmError:
    match exc:
        case DynamoVllmError():
            return exc
        case VLLMNotFoundError():
            return UnknownModel(str(exc))
        case VLLMClientError():
            return InvalidRequest(_message(exc), parameter=getattr(exc, "parameter", None))
        case GracefulHTTPError():
            return EngineOverloaded(exc.message)
        case ValueError() | TypeError():
            return InvalidRequest(_message(exc))
    # vLLM 0.30: an EngineGenerateError has no text, the reason is its cause.
    reason = exc.__cause__ or exc
    if isinstance(reason, EngineDeadError):
        return EngineDead(str(reason))
    if isinstance(reason, ValueError | VLLMClientError):
        return InvalidRequest(_message(reason))
    return EngineRequestFailed(f"{type(reason).__name__}: {reason}")


def _message(exc: BaseException) -> str:
    return str(exc.args[0]) if exc.args else str(exc)
