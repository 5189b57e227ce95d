"""How many fields and items a body of JSON has: counted before it is decoded, since each of them costs time.

What a caller sends as JSON data is kept as bytes and costs next to nothing, so it is not counted.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from halfway.rest.responses.errors import invalid

MAX_MEMBERS: Final = 25_000
"""A thousand messages with ten headers each."""
_SLICE: Final = 8192
"""Tokens that are looked at before other requests get their turn."""

# A body without escaped quotes in tokens: free JSON data begins, a bracket opens or closes, a comma, a string.
_TOKEN: Final = re.compile(rb'[^"\[\]{},]*+(?:"data"\s*+:\s*+([\[{])|([\[{])|([\]}])|(,)|"[^"]*+")')
_WITHIN_DATA: Final = re.compile(rb'[^"\[\]{}]*+(?:()([\[{])|([\]}])|()"[^"]*+")')
_DEEP: Final = 1024
"""The decoder refuses what is nested deeper."""


def weight(body: bytes) -> int:
    """Return about how many fields and items a body has, those of free JSON data and of strings included."""
    return body.count(b",") + body.count(b"{") + body.count(b"[")


async def demand_few_members(body: bytes) -> None:
    """Refuse a body with more than `MAX_MEMBERS` fields and items; other requests go on meanwhile.

    Raises:
        InvalidRequestError: it has more.

    """
    if body.count(b",") <= MAX_MEMBERS:
        return
    await asyncio.sleep(0)
    plain = body.replace(b"\\\\", b"")
    await asyncio.sleep(0)
    plain = plain.replace(b'\\"', b"")
    members = looked_at = at = depth = 0
    data_from: int | None = None
    while depth <= _DEEP:
        token = (_TOKEN if data_from is None else _WITHIN_DATA).match(plain, at)
        if token is None:
            return  # the end, or no JSON, which the decoder tells
        at = token.end()
        data, opens, closes, comma = token.groups()
        if closes is not None:
            depth -= 1
            if data_from == depth:
                data_from = None
        elif data or opens is not None:
            data_from = depth if data else data_from
            depth += 1
        elif comma:
            members += 1
            if members > MAX_MEMBERS:
                raise invalid([("", f"more than {MAX_MEMBERS} fields and items in one body: send less at once")])
        looked_at += 1
        if looked_at % _SLICE == 0:
            await asyncio.sleep(0)
