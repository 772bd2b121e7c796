"""What nobody has proven of a version of vLLM: written by `make docs` from tests/runs.toml."""

NOT_PROVEN: dict[tuple[int, ...], tuple[str, ...]] = {
    (0, 30): (),
    (0, 31): (
        "KV events",
        "prefill and decode apart",
        "LoRA",
        "media and encode workers",
        "headless nodes",
        "prompt embeddings",
        "structured output",
        "speculative decoding",
        "sleep",
        "data parallel",
        "serving on a GPU",
        "NIXL between engines on a GPU",
    ),
    (0, 32): (),
}
