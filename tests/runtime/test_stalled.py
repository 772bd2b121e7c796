"""Clients that stop reading, through the real frontend and runtime."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dynamo_vllm.serving.request.egress import CHUNKS
from harness.misbehaving import stalled
from harness.stack import TESTS, Stack, environment
from harness.waiting import until
from runtime.conftest import StartFake

OTHER = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 200}


def test_client_that_does_not_read_is_left_and_nobody_waits_for_it(
    deployment: Stack, start_fake: StartFake
) -> None:
    worker = start_fake("--unread-mb", "1", context_length=1 << 20)
    deployment.wait_ready()
    with stalled(deployment), stalled(deployment), stalled(deployment, n=2):

        def are_ended() -> bool:
            assert deployment.post("/v1/completions", OTHER).status_code == 200
            return worker.metric("dynamo_component_answers_unread_total") == 3

        until("the end of their requests", are_ended, 200)
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
    assert worker.log.read_text().count("refused: the client has more than 1000000 unread bytes") == 3


def test_runtime_has_places_for_what_is_sent_between_two_looks(tmp_path: Path) -> None:
    """A look that another stream took may be as many chunks old as are sent after it."""
    command = [sys.executable, "-m", "harness.places", str(2 * CHUNKS)]
    env = environment(
        tmp_path,
        DYN_LOG="off",
        PYTHONPATH=os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=200)
    assert int(done.stdout) >= 2 * CHUNKS, done.stderr[-2000:]
