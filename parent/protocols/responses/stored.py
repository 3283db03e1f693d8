"""What is stored of a response: its own input items and its object. What is listed of it. Pure."""

from collections.abc import Collection
from typing import Any

import msgspec

from parent.protocols.refusing import invalid
from parent.protocols.responses.items import Item
from parent.protocols.responses.object import Response
from shared.errors import ErrorCode, refuse

UNFINISHED = ("queued", "in_progress")
LOST = "the server was restarted while this response was being made; ask again"
MAX_PAGE = 100


class Delta(msgspec.Struct, frozen=True):
    """A link of a chain."""

    input: list[Item]
    response: msgspec.Raw


class Kept(msgspec.Struct, frozen=True):
    """What of a stored response is looked at."""

    id: str
    status: str
    background: bool
    output: list[Item]


_decode = msgspec.json.Decoder(Delta).decode
_decode_kept = msgspec.json.Decoder(Kept).decode


def encode(input: list[Item], response: Response) -> bytes:
    """A link's delta."""
    return msgspec.json.encode({"input": input, "response": response})


def response_of(delta: bytes) -> bytes:
    """The response as it is told. Nobody works on it any more, so one that is not over has failed."""
    raw = bytes(_decode(delta).response)
    if _decode_kept(raw).status not in UNFINISHED:
        return raw
    told: dict[str, Any] = msgspec.json.decode(raw)
    told |= {"status": "failed", "error": {"code": "server_error", "message": LOST}}
    return msgspec.json.encode(told)


def kept(delta: bytes) -> Kept:
    """The response, as far as it is looked at."""
    return _decode_kept(_decode(delta).response)


def input_of(delta: bytes) -> list[Item]:
    """Its own input items."""
    return _decode(delta).input


def conversation(deltas: list[bytes], running: Collection[str]) -> list[Item]:
    """The items of a chain that a response follows on, oldest first. `running`: the ids of those that are worked on.

    Raises `Refused` where one of them is no answer: it runs still (conflict), or has failed or was cancelled.
    """
    found: list[Item] = []
    for delta in deltas:
        response = kept(delta)
        if response.status in UNFINISHED and response.id in running:
            raise refuse(
                ErrorCode.CONFLICT,
                f"the response {response.id} is not complete; wait for it, then follow on",
                param="previous_response_id",
            )
        if response.status not in ("completed", "incomplete"):
            status = "failed" if response.status in UNFINISHED else response.status
            raise invalid(
                "previous_response_id",
                f"the response {response.id} is {status}; there is no answer to follow on",
            )
        found += [*input_of(delta), *response.output]
    return found


# ---------------------------------------------------------------- lists


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/responses/{id}/input_items`."""

    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(found: list[Item], query: dict[str, str]) -> ItemList:
    """`order` (desc unless asc), `limit` (20), `after` and `before` (ids). Raises `Refused` naming the parameter."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise invalid("limit", f"must be from 1 to {MAX_PAGE}")
    listed = found if order == "asc" else found[::-1]
    if "after" in query:
        listed = listed[_place(listed, query["after"], "after") + 1 :]
    if "before" in query:
        listed = listed[: _place(listed, query["before"], "before")]
    shown = listed[: int(limit)]
    return ItemList(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(listed) > len(shown),
    )


def _place(listed: list[Item], item_id: str, where: str) -> int:
    for place, item in enumerate(listed):
        if item["id"] == item_id:
            return place
    raise invalid(where, "there is no item of this id in the list")
