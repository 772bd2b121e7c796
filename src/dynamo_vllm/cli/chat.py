"""`dynamo-vllm chat`: talk to a running system from the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.client import DEFAULT_URL, Client, Unanswered, with_url_flag
from dynamo_vllm.config import build
from dynamo_vllm.config.build import opt
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "dynamo-vllm chat"
DESCRIPTION = (
    "Talk to a model of a running system. The URL may also be the first argument. "
    "Without --message, what is piped in is the message; at a terminal the talk goes on until /exit."
)
HELP = "/clear begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."
Message = dict[str, str]
# A model may write anything; a terminal would obey it.
_CONTROLS = {code: None for code in (*range(32), 127) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Whom to talk to, and how the answer is made."""

    url: str = opt(DEFAULT_URL, "chat", "Frontend to talk to.", env="DYN_VLLM_URL", metavar="URL")
    model: str | None = opt(
        None,
        "chat",
        "Model to talk to (default: the first one served).",
        env="DYN_VLLM_CHAT_MODEL",
        metavar="NAME",
    )
    message: str | None = opt(
        None,
        "chat",
        "Say this, print the answer and end.",
        env="DYN_VLLM_CHAT_MESSAGE",
        flags=("--message", "-m"),
        metavar="TEXT",
    )
    system: str | None = opt(
        None, "chat", "System message that begins the talk.", env="DYN_VLLM_CHAT_SYSTEM", metavar="TEXT"
    )
    max_tokens: int | None = opt(
        None, "chat", "Longest answer (default: what the model has room for).", env="DYN_VLLM_CHAT_MAX_TOKENS"
    )
    temperature: float | None = opt(
        None, "chat", "Sampling temperature (default: the model's).", env="DYN_VLLM_CHAT_TEMPERATURE"
    )
    timeout: float = opt(
        120.0, "chat", "Seconds to wait for the next token.", env="DYN_VLLM_CHAT_TIMEOUT", metavar="SECONDS"
    )


def main(argv: Sequence[str]) -> int:
    options, rest = build.parse(ChatOptions, with_url_flag(argv), build.environment(), PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is no option of chat; see '{PROG} --help'")
    message = options.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message:
        raise ConfigError("there is nothing to say; give --message TEXT or pipe a text in")
    with contextlib.closing(Client(options.url, options.timeout)) as client:
        talk = Talk(client, options)
        if message is None:
            converse(talk)
        else:
            talk.say(message)
    return 0


class Talk:
    """A conversation; what was said is sent along with every new message."""

    def __init__(self, client: Client, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self.model = options.model or first_model(client)
        self.clear()

    def clear(self) -> None:
        self._messages: list[Message] = []
        if self._options.system:
            self._messages.append({"role": "system", "content": self._options.system})

    def say(self, message: str) -> None:
        """Send a message and print the answer as it comes; one cut short is kept as far as it came."""
        asked: list[Message] = [*self._messages, {"role": "user", "content": message}]
        answer = ""
        try:
            # Closed as soon as the loop ends, so that a stopped answer stops in the engine too.
            with contextlib.closing(self._client.stream("/v1/chat/completions", self._body(asked))) as chunks:
                for chunk in chunks:
                    piece = text_of(chunk)
                    answer += piece
                    print(piece.translate(_CONTROLS) if sys.stdout.isatty() else piece, end="", flush=True)
        finally:
            print(flush=True)
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        chosen = {"max_tokens": self._options.max_tokens, "temperature": self._options.temperature}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"model": self.model, "messages": messages, **given}


def text_of(chunk: dict[str, Any]) -> str:
    """What a chunk adds to the screen, reasoning included."""
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices", ())]
    return "".join((delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas)


def first_model(client: Client) -> str:
    served = client.models()
    if not served:
        raise Unanswered(f"{client.url} serves no model yet; 'dynamo-vllm status {client.url}' shows more")
    return str(served[0]["id"])


def converse(talk: Talk) -> None:
    """Read and answer until the user has enough."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    print(f"{talk.model}: {HELP}")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line == "/exit":
            return
        if line == "/clear":
            talk.clear()
            print("begun anew")
        elif line.startswith("/"):
            print(HELP)
        elif line:
            answer(talk, line)


def answer(talk: Talk, line: str) -> None:
    """One turn; an error is printed and the talk goes on."""
    try:
        talk.say(line)
    except Unanswered as exc:
        print(f"error: {exc}", file=sys.stderr)
    except KeyboardInterrupt:
        print("[stopped]")
