"""Answers /tokenize and /detokenize as `vllm serve` does; a worker of the model does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from dynamo_vllm.gateway.body_parts import refuse_many_values
from dynamo_vllm.gateway.exchange import answered, decoded, json_reply, read_body
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from dynamo_vllm.serving.tokens.client import TokenWorkers

BODY_BYTES = 8 << 20


def routes(workers: TokenWorkers) -> list[Route]:
    """`workers` is open as long as the routes are used."""

    def converting(operation: str) -> Route:
        async def convert(request: Request) -> Response:
            text = await read_body(request, BODY_BYTES)
            refuse_many_values(text)
            body = decoded(text, dict[str, Any])
            model = body.get("model")
            if not isinstance(model, str | None):
                raise GatewayError(400, "model is a text", parameter="model")
            reply = await workers.convert(operation, model, body)
            if reply["status"] != 200:
                raise GatewayError(reply["status"], reply["message"], parameter=reply.get("parameter"))
            return json_reply(reply["body"])

        return Route(f"/{operation}", answered(convert), methods=["POST"])

    return [converting("tokenize"), converting("detokenize")]
