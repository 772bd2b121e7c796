"""Starts one vLLM engine in this process, sends it all phases of a plan, and returns its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiers_proof.requests import Ask, Phase, Plan, in_other_orders

TOPS = 5
"""The number of most probable tokens whose log-probabilities are kept for each token."""


def answers(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what all phases gave, or the first `last` of them, and the engine's sizes."""
    from vllm import LLM

    llm = LLM(disable_log_stats=False, **given["flags"])
    engine = Engine(llm, given["adapters"])
    block = llm.llm_engine.vllm_config.cache_config.block_size
    phases = in_other_orders(plan(block)[: given["last"]], given["orders"])
    found = [engine.run(phase) for phase in phases]
    return {"block": block, "bytes_per_block": engine.bytes_per_block(), "phases": found}


class Engine:
    """Sends requests to an LLM, step by step."""

    def __init__(self, llm: Any, adapters: Mapping[str, Sequence[str]]) -> None:
        self._llm, self._engine, self._adapters = llm, llm.llm_engine, dict(adapters)
        self._count = 0

    def bytes_per_block(self) -> int:
        config = self._core.scheduler.kv_cache_config
        return int(config.kv_cache_tensors[0].size // config.num_blocks)

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def run(self, phase: Phase) -> dict[str, Any]:
        if phase.before is not None:
            getattr(self, "_" + phase.before.replace("-", "_"))()
        before = self.figures()
        batches = [list(phase.asks)] if phase.together else [[ask] for ask in phase.asks]
        found: dict[str, Any] = {}
        for batch in batches:
            found |= self._answer(batch, phase.aborts)
        after = self.figures()
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        return {"name": phase.name, "answers": found, "figures": {n: v for n, v in grown.items() if v}}

    def _answer(self, batch: list[Ask], aborts: Mapping[str, int]) -> dict[str, Any]:
        self._count += 1
        running = {f"{ask.name}-{self._count}": ask for ask in batch}
        for request_id, ask in running.items():
            prompt, params, lora = self._request(ask)
            self._engine.add_request(request_id, prompt, params, lora_request=lora)
        ends = {request_id: aborts[ask.name] for request_id, ask in running.items() if ask.name in aborts}
        found: dict[str, Any] = {}
        steps = 0
        while self._engine.has_unfinished_requests():
            steps += 1
            for output in self._engine.step():
                if output.finished:
                    found[running[output.request_id].name] = _answer(output)
            if due := [request_id for request_id, after in ends.items() if after == steps]:
                self._engine.abort_request(due)
        return {name: answer for name, answer in found.items() if name not in aborts}

    def _request(self, ask: Ask) -> tuple[Any, Any, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        from tiers_proof import contents

        params = SamplingParams(
            max_tokens=ask.max_tokens,
            temperature=0.0 if ask.n == 1 else 0.9,
            n=ask.n,
            logprobs=TOPS,
            prompt_logprobs=0 if ask.prompt_logprobs else None,
            ignore_eos=ask.regex is None,
            structured_outputs=StructuredOutputsParams(regex=ask.regex) if ask.regex else None,
        )
        prompt = contents.prompt(ask, self._engine.vllm_config.model_config)
        lora = None
        if ask.adapter is not None:
            number = sorted(self._adapters).index(ask.adapter) + 1
            lora = LoRARequest(ask.adapter, number, self._adapters[ask.adapter][0])
        return prompt, params, lora

    def figures(self) -> dict[str, int]:
        """Returns tokens by where they came from, and preemptions."""
        found: dict[str, int] = {}
        for metric in self._llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_cached_by_source":
                source = metric.labels.get("source") or metric.labels.get("tier") or str(metric.labels)
                found[source] = found.get(source, 0) + int(metric.value)
            elif metric.name in ("vllm:num_preemptions", "vllm:spec_decode_num_accepted_tokens"):
                found[metric.name.removeprefix("vllm:")] = int(metric.value)
        return found

    def _clear(self) -> None:
        self._engine.reset_prefix_cache(reset_connector=True)


def _answer(output: Any) -> dict[str, Any]:
    return {
        "cached": output.num_cached_tokens,
        "prompt_logprobs": [next(iter(at.values())).logprob if at else None for at in output.prompt_logprobs]
        if output.prompt_logprobs
        else None,
        "choices": [_choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)],
    }


def _choice(choice: Any) -> dict[str, Any]:
    logprobs = [at[token].logprob for token, at in zip(choice.token_ids, choice.logprobs, strict=True)]
    tops = [[[token, entry.logprob] for token, entry in at.items()] for at in choice.logprobs]
    return {"tokens": list(choice.token_ids), "logprobs": logprobs, "tops": tops}


def run(given: Mapping[str, Any]) -> dict[str, Any]:
    """Is called in a process of its own, with one life of a case."""
    from tiers_proof.cases import BY_NAME

    life = BY_NAME[given["case"]].lives[given["life"]]
    return answers(life.plan, given)
