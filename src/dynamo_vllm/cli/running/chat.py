"""Runs `dynamo-vllm chat`: a chat with a running system in the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from dynamo_vllm.cli.running import deployment
from dynamo_vllm.config import build
from dynamo_vllm.config.build import opt
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.observe.frontend_client import (
    DEFAULT_URL,
    FrontendClient,
    Unanswered,
    harmless,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROG = "dynamo-vllm chat"
DESCRIPTION = (
    "Chat with a model of a running system. The URL may also be the first argument. "
    "Without --message, the message is read from a pipe; at a terminal the chat continues until /exit."
)
HELP = "/reset starts anew, /model lists models or selects one, /exit or Ctrl-D ends, Ctrl-C stops an answer."
Message = dict[str, str]
NOT_FOUND = 404
"""How a frontend answers for a model that does not chat."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options of `chat`."""

    url: str | None = opt(
        None,
        "chat",
        f"URL of the frontend (default: that of the serve on this machine, else {DEFAULT_URL}).",
        env="DYN_VLLM_URL",
        metavar="URL",
    )
    model: str | None = opt(
        None,
        "chat",
        "Model to chat with (default: the first by name).",
        env="DYN_VLLM_CHAT_MODEL",
        metavar="NAME",
    )
    message: str | None = opt(
        None,
        "chat",
        "Send this message, print the answer and exit.",
        env="DYN_VLLM_CHAT_MESSAGE",
        flags=("--message", "-m"),
        metavar="TEXT",
    )
    system: str | None = opt(
        None, "chat", "System message at the start of the chat.", env="DYN_VLLM_CHAT_SYSTEM", metavar="TEXT"
    )
    max_tokens: int | None = opt(
        None,
        "chat",
        "Maximum tokens of an answer (default: what the model's context allows).",
        env="DYN_VLLM_CHAT_MAX_TOKENS",
    )
    temperature: float | None = opt(
        None, "chat", "Sampling temperature (default: the model's).", env="DYN_VLLM_CHAT_TEMPERATURE"
    )
    reasoning: bool = opt(
        True,
        "chat",
        "Show the model's reasoning before its answer, dimmed; only on a terminal.",
        env="DYN_VLLM_CHAT_REASONING",
    )
    timeout: float = opt(
        120.0, "chat", "Seconds to wait for the next token.", env="DYN_VLLM_CHAT_TIMEOUT", metavar="SECONDS"
    )


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = build.parse(ChatOptions, deployment.with_url_flag(argv), environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of chat; see '{PROG} --help'")
    message = options.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message:
        raise ConfigError("the message is empty; give --message TEXT or pipe a text in")
    url = options.url or deployment.frontend(environment) or DEFAULT_URL
    with contextlib.closing(FrontendClient(url, options.timeout)) as client:
        chat = Chat(client, options)
        if message is None:
            converse(chat)
        else:
            chat.send(message)
    return 0


class Chat:
    """A conversation. Every new message is sent with all earlier ones."""

    def __init__(self, client: FrontendClient, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._others: list[str] = []
        """Models to try instead, if the first does not chat."""
        if options.model is not None:
            self.model = options.model
        else:
            self.model, *self._others = models(client)
        self.clear()

    def clear(self) -> None:
        self._messages: list[Message] = []
        if self._options.system:
            self._messages.append({"role": "system", "content": self._options.system})

    def choose(self, name: str) -> str:
        """Switch to another model and keep the messages; return the text to show to the user."""
        served = models(self._client)
        if name in served:
            self.model = name
        elif name:
            return harmless(f"{name} is not served; choose one of {', '.join(served)}")
        return harmless("\n".join(f"{'*' if found == self.model else ' '} {found}" for found in served))

    def send(self, message: str) -> None:
        """Send a message and print the answer as it arrives; a stopped answer is kept as far as it came."""
        while True:
            try:
                return self._send(message)
            except Unanswered as exc:
                if exc.status != NOT_FOUND:
                    raise
                if not self._others:
                    raise self._no_chat(exc) from None
                self.model, *self._others = self._others

    def _no_chat(self, refused: Unanswered) -> Unanswered:
        if self.model not in {entry["id"] for entry in self._client.models()}:
            served = ", ".join(models(self._client))
            return Unanswered(harmless(f"{self.model} is not served; choose one of {served}"))
        return Unanswered(
            f"{harmless(self.model)} does not chat ({refused}); choose another with --model. A model for "
            "embeddings, reranking or transcription has its own API: 'dynamo-vllm search' uses the first two"
        )

    def _send(self, message: str) -> None:
        asked: list[Message] = [*self._messages, {"role": "user", "content": message}]
        page = Page(sys.stdout, shows_reasoning=self._options.reasoning)
        is_refused = False
        try:
            # Closed as soon as the loop ends, so that a stopped answer stops in the engine too.
            with contextlib.closing(self._client.stream("/v1/chat/completions", self._body(asked))) as chunks:
                for chunk in chunks:
                    for choice in chunk.get("choices", ()):
                        page.add(choice.get("delta") or {})
        except Unanswered:
            is_refused = not (page.answer or page.reasoning)
            raise
        finally:
            if not is_refused:
                page.end()
            if page.answer:  # without the reasoning, as models are trained
                self._messages = [*asked, {"role": "assistant", "content": page.answer}]
        if page.reasoning and not page.answer:
            print("the answer is empty after the reasoning; a higher --max-tokens may help", file=sys.stderr)

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        chosen = {"max_tokens": self._options.max_tokens, "temperature": self._options.temperature}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"model": self.model, "messages": messages, **given}


class Page:
    """Prints an answer. A terminal shows the reasoning dimmed; other programs do not get it."""

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
        if text := text_of(delta.get("content")):
            # The reasoning ends with its own line.
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


def text_of(content: Any) -> str:
    """Return the text of a delta. Other parts, such as images, become a word: a terminal cannot show them."""
    if not isinstance(content, list):
        return str(content or "")
    parts = (part for part in content if isinstance(part, dict))
    return "".join(
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')}]\n"
        for part in parts
    )


def models(client: FrontendClient) -> list[str]:
    # The frontend lists them in no order, with adapters between base models.
    listed = client.models()
    if not listed:
        raise Unanswered(f"{client.url} serves no model yet; 'dynamo-vllm status {client.url}' shows more")
    # A frontend does not say what a model is for; a gateway does.
    served = sorted(str(entry["id"]) for entry in listed if entry.get("kind", "generate") == "generate")
    if not served:
        others = ", ".join(sorted(f"{entry['id']} ({entry['kind']})" for entry in listed))
        raise Unanswered(harmless(f"{client.url} has no model that chats; it serves {others}"))
    return served


def converse(chat: Chat) -> None:
    """Read messages from the terminal and answer them, until the user ends the chat."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    print(harmless(f"{chat.model}: {HELP}"))
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
            chat.clear()
            print("started anew")
        elif command == "/model":
            with errors_printed():
                print(chat.choose(rest.strip()))
        elif line.startswith("/"):
            print(HELP)
        elif line:
            with errors_printed():
                chat.send(line)


@contextlib.contextmanager
def errors_printed() -> Iterator[None]:
    """Run one turn; print its error, so that the chat continues."""
    try:
        yield
    except Unanswered as exc:
        print(f"error: {exc}", file=sys.stderr)
    except KeyboardInterrupt:
        print("[stopped]")
