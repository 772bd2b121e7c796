"""Requests to a worker's system port for a fuzz test: verbs with bodies that fit and that do not."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from hypothesis import strategies as st

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.serving.system_port.routes import ROUTES
from harness.fuzz_bodies import of_type
from harness.fuzz_odd import NUMBERS, WORDS, as_json, mutated
from harness.fuzz_wire import Asked, requests

TOKEN = ("authorization", "Bearer sesame")
METHODS = ["POST", "POST", "POST", "GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "BREW"]
ASIDE = ["/live", "/health", "/metrics", "/v1/metadata/x", "/v1/metadata/../x", "/engine/", "//", "*", "/%00"]
PATHS = ["/" + "/".join(way.parts).replace("{lora_name}", "one%2Ftwo") for way in ROUTES]


def bodies(verb: str) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of the verb's body, of their types or numbers and words."""
    hints = get_type_hints(VERBS[verb].body)
    some = {name: of_type(hint) | NUMBERS | WORDS for name, hint in hints.items()}
    source = st.fixed_dictionaries(
        {"uri": st.sampled_from(["file:///no/such", "file:///", "", "x://y"]) | WORDS}
    )
    return st.fixed_dictionaries({}, optional={**some, **({"source": source} if "source" in some else {})})


@st.composite
def verbs(draw: st.DrawFn) -> Asked:
    """With the token, mostly, and without it."""
    way = draw(st.sampled_from(ROUTES))
    path = "/" + "/".join(way.parts).replace("{lora_name}", "one%2Ftwo")
    path = draw(st.sampled_from([path] * 6 + [path + "?a=b", path + "/", *PATHS, *ASIDE]))
    asked = draw(requests(path, as_json(mutated(bodies(way.verb)))))
    method = draw(st.sampled_from([way.method] * 8 + METHODS))
    given = draw(st.sampled_from([(TOKEN,)] * 3 + [(), (("authorization", "Bearer wrong"),)]))
    others = tuple(header for header in asked.headers if header[0] != "authorization")
    return dataclasses.replace(asked, method=method, headers=(*others, *given))
