"""The fields of a request that name adapters."""

from typing import Any

import msgspec
import pytest

from parent.protocols.openai import chat, completions
from parent.protocols.responses import decode as responses
from shared.errors import ErrorCode, Refused

BODIES: list[tuple[Any, dict[str, Any]]] = [
    (chat.decode, {"messages": [{"role": "user", "content": "hi"}]}),
    (completions.decode, {"prompt": "hi"}),
    (responses.decode, {"input": "hi"}),
]
WAYS = [decode.__module__.rpartition("protocols.")[2] for decode, _ in BODIES]


@pytest.mark.parametrize(("decode", "body"), BODIES, ids=WAYS)
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, None),
        ({"adapter": None}, None),
        ({"adapter": ""}, []),
        ({"adapter": "none"}, []),
        ({"adapter": []}, []),
        ({"adapter": ["none"]}, []),
        ({"adapter": "a"}, ["a"]),
        ({"adapter": " a + b "}, ["a", "b"]),
        ({"adapter": "a,b"}, ["a", "b"]),
        ({"adapters": ["b", "deep/a"]}, ["b", "deep/a"]),
        ({"adapter": "a+b", "adapters": ["a", "b"]}, ["a", "b"]),
    ],
)
def test_adapters_are_named_by_a_text_or_a_list(
    decode: Any, body: dict[str, Any], fields: dict[str, Any], names: list[str] | None
) -> None:
    assert decode(msgspec.json.encode({**body, **fields})).adapter == names


@pytest.mark.parametrize(("decode", "body"), BODIES, ids=WAYS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"adapter": 1}, "adapter"),
        ({"adapter": [1]}, "adapter[0]"),
        ({"adapter": "a+"}, "adapter"),
        ({"adapter": "+"}, "adapter"),
        ({"adapter": ["a+b"]}, "adapter"),
        ({"adapter": ["a", "none"]}, "adapter"),
        ({"adapters": "m:a"}, "adapters"),
        ({"adapters": ["a"] * 9}, "adapters"),
        ({"adapter": "a", "adapters": "b"}, "adapters"),
    ],
)
def test_what_names_no_adapter_is_refused_by_its_field(
    decode: Any, body: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(Refused) as refused:
        decode(msgspec.json.encode({**body, **fields}))
    assert (refused.value.failure.code, refused.value.failure.param) == (ErrorCode.INVALID_REQUEST, param)
