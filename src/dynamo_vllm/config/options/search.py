"""Options of `search`: a question, what to search, and which models do it."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """A question to the documentation or to a folder of texts."""

    question: str | None = opt(
        None, "search", "What to look for.", env="DYN_VLLM_SEARCH_QUESTION", metavar="TEXT"
    )
    url: str | None = opt(
        None,
        "search",
        "URL of the gateway or the frontend (default: that of the serve on this machine, else "
        "http://127.0.0.1:8000).",
        env="DYN_VLLM_URL",
        metavar="URL",
    )
    folder: str | None = opt(
        None,
        "search",
        "Folder of .md and .txt files to search (default: the documentation of this package).",
        env="DYN_VLLM_SEARCH_FOLDER",
        metavar="FOLDER",
    )
    embed_model: str | None = opt(
        None,
        "search",
        "Model for embeddings (default: found in /v1/models).",
        env="DYN_VLLM_SEARCH_EMBED_MODEL",
        metavar="NAME",
    )
    rerank_model: str | None = opt(
        None,
        "search",
        "Model that orders the pages (default: found in /v1/models).",
        env="DYN_VLLM_SEARCH_RERANK_MODEL",
        metavar="NAME",
    )
    chat_model: str | None = opt(
        None,
        "search",
        "Model that answers (default: found in /v1/models).",
        env="DYN_VLLM_SEARCH_CHAT_MODEL",
        metavar="NAME",
    )
    rerank: bool = opt(True, "search", "Order the pages with a reranker.", env="DYN_VLLM_SEARCH_RERANK")
    chat: bool = opt(True, "search", "Let a chat model answer from the pages.", env="DYN_VLLM_SEARCH_CHAT")
    top: int = opt(3, "search", "How many pages to print.", env="DYN_VLLM_SEARCH_TOP", metavar="N")
    candidates: int = opt(
        10,
        "search",
        "How many pages the reranker gets: the nearest by their embeddings.",
        env="DYN_VLLM_SEARCH_CANDIDATES",
        metavar="N",
    )
    instruction: str | None = opt(
        None,
        "search",
        "What to write before the question for the embedding model, as its card says; for Qwen3-Embedding "
        "'Instruct: …\\nQuery:'.",
        env="DYN_VLLM_SEARCH_INSTRUCTION",
        metavar="TEXT",
    )
    timeout: float = opt(
        120.0,
        "search",
        "Seconds to wait for an answer.",
        env="DYN_VLLM_SEARCH_TIMEOUT",
        metavar="SECONDS",
    )
    json: bool = opt(False, "search", "Print JSON for other programs.", env="DYN_VLLM_SEARCH_JSON")
