"""Tests prefill and decode engines on separate hosts, with NIXL over TCP between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cpu.completions import PATH, Completion, body
from cpu.pairs import IN_FLIGHT, LOST, NIXL, prompt, prompts
from harness import listening
from harness.hosts import Host, Hosts, hosts, refusal
from harness.processes import free_port
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from harness.warm import Zygote

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(600),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]
# To UCX our hosts are one machine, which shares memory and a loopback.
ONLY_NETWORK = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
CUT_SECONDS = 10.0


class Pair:
    """Has a frontend on host a, a prefill worker on b and a decode worker on c."""

    def __init__(self, places: Hosts, made: Stack, prefill: Worker, decode: Worker) -> None:
        self.places, self.stack, self.prefill, self.decode = places, made, prefill, decode

    def is_alive(self) -> bool:
        return all(worker.process.poll() is None for worker in self.stack.workers)


@pytest.fixture(scope="module")
def pair(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with hosts("a", "b", "c") as places, stack(tmp_path_factory.mktemp("hosts")) as made:
        made.start_frontend("--host", "0.0.0.0", host=places["a"])
        prefill, decode = (
            warm.start_worker(made, model, *NIXL, role, env=ONLY_NETWORK, host=places[place])
            for role, place in (("prefill", "b"), ("decode", "c"))
        )
        made.wait_ready(120).wait_over_two()
        yield Pair(places, made, prefill, decode)


def test_nodes_listen_where_the_docs_say(warm: Zygote, model: Path, tmp_path: Path) -> None:
    """One worker on two hosts listens publicly only as docs/security.md says, otherwise at one address."""
    with hosts("a", "b") as places, stack(tmp_path) as made:
        leader, card_port = places["a"], free_port()
        flags = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--admin-token", "hush")
        at = ("--data-parallel-address", leader.address, "--data-parallel-rpc-port", "29000")
        made.start_frontend("--host", leader.address, host=leader)
        headless = ("--headless", "--data-parallel-start-rank", "1")
        node = warm.start_node(made, model, *flags, *at, *headless, host=places["b"])
        worker = warm.start_worker(made, model, *flags, *at, "--card-port", str(card_port), host=leader)
        made.wait_ready(120)
        until("a ready node", node.is_ready)
        assert text(made, prompt(100)) is not None
        found = listening.for_other_machines(made.pids())
        everywhere = {one.port for one in found if one.address in ("0.0.0.0", "::")}
        assert everywhere == {worker.system_port, node.system_port, card_port, *event_ports(tmp_path)}
        assert {one.address for one in found if one.port not in everywhere} == {leader.address}


def event_ports(folder: Path) -> set[int]:
    """Returns the ports of the event plane, from discovery."""
    entries = [entry.read_text() for entry in (folder / "discovery").rglob("*") if entry.is_file()]
    found = {int(port) for entry in entries for port in re.findall(r'"endpoint":"tcp://[^"]*:(\d+)"', entry)}
    assert found
    return found


def text(made: Stack, words: list[int], max_tokens: int = 16) -> str | None:
    """Returns the text; None for an error after which the client may send the request again."""
    answer = made.post(PATH, body(words, max_tokens))
    assert answer.status_code == 200 or answer.status_code >= 500, answer.text
    return Completion(answer.json()).text if answer.status_code == 200 else None


def texts(made: Stack, every: list[list[int]]) -> list[str | None]:
    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(lambda words: text(made, words), every))


def test_answers_equal_one_engine_on_one_host(pair: Pair, one_worker: Stack) -> None:
    every = prompts(12, 1200, seed=21)
    assert texts(pair.stack, every) == texts(one_worker, every)
    assert pair.decode.metric(LOST) == 0, "every cache came over the network"
    assert pair.decode.metric("vllm:nixl_num_failed_transfers") == 0


@pytest.mark.long
@pytest.mark.parametrize("cut", [Host.go_silent, Host.pull_cable])
def test_decode_host_cut_off_while_caches_are_fetched(
    pair: Pair, one_worker: Stack, cut: Callable[[Host], None]
) -> None:
    every = [prompt(1500) for _ in range(6)]
    expected = texts(one_worker, every)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(texts, pair.stack, every)
        until("caches to fetch", lambda: pair.decode.metric(IN_FLIGHT) > 0)
        cut(pair.places["c"])
        time.sleep(CUT_SECONDS)
        pair.places["c"].restore()
        until("an answer", lambda: text(pair.stack, every[0], 1) is not None)
        found = answers.result(90)
    assert all(one in (None, wanted) for one, wanted in zip(found, expected, strict=True))
    assert pair.is_alive()
    assert texts(pair.stack, every) == expected
