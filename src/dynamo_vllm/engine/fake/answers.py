"""Makes what the fake engine answers; pure functions of the job.

The token at position p of a sequence depends only on p and the prompt's first token, so a request that
moves to another worker with its generated tokens appended goes on exactly where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.job import Position, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.job import Job


def rank_of(job: Job) -> int:
    return job.data_parallel_rank or 0


def token_at(job: Job, position: int, vocab_size: int) -> int:
    """Ids 10 … vocab_size-1, counting up with the position; each adapter begins elsewhere."""
    start = job.prompt[0] * 7 + (job.adapter.id * 31 if job.adapter else 0)
    return 10 + (start + position) % (vocab_size - 10)


def handover(job: Job) -> dict[str, object] | None:
    """What NIXL would hand over for a prefill job."""
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
    return len(job.prompt) - 1 if (job.transfer or {}).get("do_remote_prefill") else 0


def logprobs(job: Job, ids: Sequence[int]) -> list[Position] | None:
    """As many candidates for each as were asked for; the one chosen is the likeliest."""
    count = job.sampling.logprobs
    if count is None:
        return None
    found = [
        [TokenLogprob(chosen + i, -0.5 - i, i + 1, None) for i in range(max(1, count))] for chosen in ids
    ]
    return [Position(candidates[0], candidates) for candidates in found]
