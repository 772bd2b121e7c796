"""Requests for pictures that cannot be drawn, each with what the 400 must name."""

from __future__ import annotations

from typing import Any

BAD_PICTURES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"size": "0x0"}, "size"),
    ({"size": "60x60"}, "size"),
    ({"size": "100000x100000"}, "size"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": 10**6}, "num_inference_steps"),
    ({"n": 0}, "n:"),
    ({"n": 100}, "n:"),
    ({"n": 10, "size": "2048x2048"}, "n: 10 images"),
    ({"response_format": "gif"}, "gif"),
    ({"output_format": "tiff"}, "tiff"),
    ({"prompt": "word " * 200}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"guidance_scale": -1}, "guidance_scale"),
)
"""What differs from a request that is fine; for a model that reads 77 tokens and draws in steps of 8."""
