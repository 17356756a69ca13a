"""The OpenAPI document against the server that it describes, by schemathesis: what it allows, and what it forbids.

ROPEWALK_EXAMPLES sets how many requests are tried for each endpoint.
"""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks

from ropewalk.serve import page
from ropewalk.serve.openapi import document
from ropewalk.serve.options import ServerOptions

EXAMPLES = int(os.environ.get("ROPEWALK_EXAMPLES", "10"))
NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.fixture(scope="session")
def described(smol, serve):
    """A server of SmolLM2 whose answers have two tokens at most."""
    options = ServerOptions(max_output_tokens=2, max_prompt_tokens=64, max_queue=600, grace_s=1.0)
    with serve(smol.llm, name="smol", options=options) as server:
        yield server


load_all_checks()
schema = schemathesis.openapi.from_dict(document(["smol"]))


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 10,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_server_is_as_the_document_says(case, described):
    case.call_and_validate(base_url=described.url, checks=CHECKS.get_by_names(NAMES), timeout=300)


def test_what_is_described(smol):
    described = smol.get("/openapi.json").json()
    assert described == document(["smol", "gpt-4o"])
    assert set(described["paths"]) == {
        *(
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/v1/models",
            "/v1/models/{model}",
        ),
        *(
            "/tokenize",
            "/detokenize",
            "/tokenizer_info",
            "/health",
            "/metrics",
            "/version",
            "/machine",
            "/openapi.json",
        ),
    }
    served = {route.path.replace(":path", "") for route in smol.endpoints.routes()}
    assert served - page.PATHS == set(described["paths"])
