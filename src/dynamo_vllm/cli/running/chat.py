"""`dynamo-vllm chat`: talk to a running system from the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from dynamo_vllm.cli.running import deployment
from dynamo_vllm.cli.running.frontend_client import (
    DEFAULT_URL,
    FrontendClient,
    Unanswered,
    harmless,
    with_url_flag,
)
from dynamo_vllm.config import build
from dynamo_vllm.config.build import opt
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROG = "dynamo-vllm chat"
DESCRIPTION = (
    "Talk to a model of a running system. The URL may also be the first argument. "
    "Without --message, what is piped in is the message; at a terminal the talk goes on until /exit."
)
HELP = "/reset begins anew, /model shows models or takes one, /exit or Ctrl-D ends, Ctrl-C stops an answer."
Message = dict[str, str]
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Whom to talk to, and how the answer is made."""

    url: str | None = opt(
        None,
        "chat",
        f"Frontend to talk to (default: of the serve that runs here, else {DEFAULT_URL}).",
        env="DYN_VLLM_URL",
        metavar="URL",
    )
    model: str | None = opt(
        None,
        "chat",
        "Model to talk to (default: the first by name).",
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
    reasoning: bool = opt(
        True,
        "chat",
        "Show what a model thinks before it answers, dimmed; only a terminal gets to see it.",
        env="DYN_VLLM_CHAT_REASONING",
    )
    timeout: float = opt(
        120.0, "chat", "Seconds to wait for the next token.", env="DYN_VLLM_CHAT_TIMEOUT", metavar="SECONDS"
    )


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = build.parse(ChatOptions, with_url_flag(argv), environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is no option of chat; see '{PROG} --help'")
    message = options.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message:
        raise ConfigError("there is nothing to say; give --message TEXT or pipe a text in")
    url = options.url or deployment.frontend(environment) or DEFAULT_URL
    with contextlib.closing(FrontendClient(url, options.timeout)) as client:
        talk = Talk(client, options)
        if message is None:
            converse(talk)
        else:
            talk.say(message)
    return 0


class Talk:
    """A conversation; what was said is sent along with every new message."""

    def __init__(self, client: FrontendClient, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self.model = options.model or models(client)[0]
        self.clear()

    def clear(self) -> None:
        self._messages: list[Message] = []
        if self._options.system:
            self._messages.append({"role": "system", "content": self._options.system})

    def choose(self, name: str) -> str:
        """Go on with another model, with all that was said; what to tell the user."""
        served = models(self._client)
        if name in served:
            self.model = name
        elif name:
            return harmless(f"{name} is not served; there are {', '.join(served)}")
        return harmless("\n".join(f"{'*' if found == self.model else ' '} {found}" for found in served))

    def say(self, message: str) -> None:
        """Send a message and print the answer as it comes; one cut short is kept as far as it came."""
        asked: list[Message] = [*self._messages, {"role": "user", "content": message}]
        page = Page(sys.stdout, shows_reasoning=self._options.reasoning)
        try:
            # Closed as soon as the loop ends, so that a stopped answer stops in the engine too.
            with contextlib.closing(self._client.stream("/v1/chat/completions", self._body(asked))) as chunks:
                for chunk in chunks:
                    for choice in chunk.get("choices", ()):
                        page.add(choice.get("delta") or {})
        finally:
            page.end()
            if page.answer:  # without its thoughts, as models are trained
                self._messages = [*asked, {"role": "assistant", "content": page.answer}]
        if page.reasoning and not page.answer:
            print("the answer is empty: the model only thought; --max-tokens may help", file=sys.stderr)

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        chosen = {"max_tokens": self._options.max_tokens, "temperature": self._options.temperature}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"model": self.model, "messages": messages, **given}


class Page:
    """An answer on its way to the screen; thoughts are dimmed there, and not for other programs."""

    def __init__(self, out: TextIO, shows_reasoning: bool) -> None:
        self.answer = ""
        self.reasoning = ""
        self._out = out
        self._is_terminal = out.isatty()
        self._shows_reasoning = shows_reasoning and self._is_terminal
        self._is_dim = False

    def add(self, delta: dict[str, Any]) -> None:
        if thought := delta.get("reasoning_content"):
            self.reasoning += thought
            if self._shows_reasoning:
                self._print(thought, dim=True)
        if text := said(delta.get("content")):
            # Thoughts have a line of their own.
            first = "\n" if self._is_dim and not self.answer else ""
            self.answer += text
            self._print(first + text, dim=False)

    def end(self) -> None:
        self._print("\n", dim=False)

    def _print(self, text: str, dim: bool) -> None:
        if self._is_terminal:
            text = harmless(text)
        if dim != self._is_dim:
            text = (_DIM if dim else _PLAIN) + text
            self._is_dim = dim
        self._out.write(text)
        self._out.flush()


def said(content: Any) -> str:
    """The text of a delta; a model that draws sends parts, and a terminal shows no pictures."""
    if not isinstance(content, list):
        return str(content or "")
    parts = (part for part in content if isinstance(part, dict))
    return "".join(
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]\n"
        for part in parts
    )


def models(client: FrontendClient) -> list[str]:
    # The frontend lists them in any order, adapters among base models.
    served = sorted(str(entry["id"]) for entry in client.models())
    if not served:
        raise Unanswered(f"{client.url} serves no model yet; 'dynamo-vllm status {client.url}' shows more")
    return served


def converse(talk: Talk) -> None:
    """Read and answer until the user has enough."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    print(harmless(f"{talk.model}: {HELP}"))
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return
        if command in ("/reset", "/clear"):
            talk.clear()
            print("begun anew")
        elif command == "/model":
            with going_on():
                print(talk.choose(rest.strip()))
        elif line.startswith("/"):
            print(HELP)
        elif line:
            with going_on():
                talk.say(line)


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """One turn; an error is printed and the talk goes on."""
    try:
        yield
    except Unanswered as exc:
        print(f"error: {exc}", file=sys.stderr)
    except KeyboardInterrupt:
        print("[stopped]")
