"""Plans more workers of a running `serve`, and takes back what ended ones had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm import ports
from dynamo_vllm.errors import ConfigError, DynamoVllmError
from dynamo_vllm.supervise.planning import tiers
from dynamo_vllm.supervise.planning.workers import with_engine_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.worker_plan import WorkerPlan
    from dynamo_vllm.supervise.planning.process import Group, Process
    from dynamo_vllm.supervise.planning.workers import GroupTemplate, WorkerProcesses


class Pool:
    """The groups of a plan; implements `process.WorkerPool`."""

    def __init__(self, workers: WorkerProcesses) -> None:
        self._workers = workers

    @property
    def groups(self) -> Mapping[str, Group]:
        return {name: template.group for name, template in self._workers.templates.items()}

    def more(self, group: str, running: Sequence[Process], count: int) -> list[Process]:
        template = self._workers.templates[group]
        _refuse_nodes(template)
        tiers.refuse_more_beside(template.worker, count, self._plans_of(running))
        made: list[Process] = []
        try:
            for _ in range(count):
                worker = self._workers.one_more(template)
                made.append(worker)
                _refuse_taken_ports(worker)
        except DynamoVllmError:
            for worker in made:
                self._workers.release(worker.name)
            raise
        ports.leave_out(self._workers.named_ports)
        return with_engine_count(made, running)

    def release(self, worker: Process) -> None:
        self._workers.release(worker.name)

    def _plans_of(self, running: Sequence[Process]) -> list[tuple[WorkerPlan, int]]:
        counted = {name: sum(worker.group == name for worker in running) for name in self._workers.templates}
        return [(self._workers.templates[name].worker, count) for name, count in counted.items() if count]


def _refuse_nodes(template: GroupTemplate) -> None:
    """Nodes elsewhere have the ranks of one worker, not of several."""
    node = template.worker.node
    if node.is_headless or node.has_followers or node.serves_own_ranks:
        raise ConfigError(
            f"workers of {template.group.name} share ranks with other nodes, so their number is fixed; "
            "start a further serve instead"
        )


def _refuse_taken_ports(worker: Process) -> None:
    for option, port in (("--system-port", worker.port), ("--card-port", worker.card_port)):
        if port is not None:
            ports.refuse_taken(option, "0.0.0.0", port)
