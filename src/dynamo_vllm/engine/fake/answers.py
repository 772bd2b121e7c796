"""Computes the fake engine's answers, as pure functions of the job.

The token at position p of a sequence depends only on p and the prompt's first token. So a request that
migrates to another worker, with its generated tokens appended, continues exactly where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.job import Position, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.job import Job


def rank_of(job: Job) -> int:
    """Returns the data-parallel rank that runs the job."""
    return job.data_parallel_rank or 0


def token_at(job: Job, position: int, vocab_size: int) -> int:
    """Returns an id from 10 to vocab_size-1 that counts up with the position; adapters have an offset."""
    start = job.prompt[0] * 7 + (job.adapter.id * 31 if job.adapter else 0)
    return 10 + (start + position) % (vocab_size - 10)


def transfer_params(job: Job) -> dict[str, object] | None:
    """Returns the kv_transfer_params that NIXL would return for a prefill job."""
    if not (job.transfer or {}).get("do_remote_decode"):
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "fake",
        "remote_request_id": job.id,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_block_ids": [[0]],
        "remote_num_tokens": len(job.prompt),
        "tp_size": 1,
    }


def fetched(job: Job) -> int:
    """Returns how many prompt tokens come from a prefill worker's KV cache."""
    return len(job.prompt) - 1 if (job.transfer or {}).get("do_remote_prefill") else 0


def logprobs(job: Job, ids: Sequence[int]) -> list[Position] | None:
    """Returns the requested number of candidates per token; the chosen one has the highest probability."""
    count = job.sampling.logprobs
    if count is None:
        return None
    found = [
        [TokenLogprob(chosen + i, -0.5 - i, i + 1, None) for i in range(max(1, count))] for chosen in ids
    ]
    return [Position(candidates[0], candidates) for candidates in found]
