"""Counts the fields and items of a JSON body before it is decoded, because each of them costs time.

JSON data of the caller is kept as bytes and costs next to nothing, so it is not counted.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from halfway.rest.responses.errors import invalid

MAX_MEMBERS: Final = 25_000
"""A thousand messages with ten headers each."""
_SLICE: Final = 8192
"""Tokens to count before yielding to other requests."""

# The tokens of a body without escaped quotes: the start of JSON data, a bracket, a comma, a string.
_TOKEN: Final = re.compile(rb'[^"\[\]{},]*+(?:"data"\s*+:\s*+([\[{])|([\[{])|([\]}])|(,)|"[^"]*+")')
_WITHIN_DATA: Final = re.compile(rb'[^"\[\]{}]*+(?:()([\[{])|([\]}])|()"[^"]*+")')
_DEEP: Final = 1024
"""The decoder refuses deeper nesting."""


def weight(body: bytes) -> int:
    """Estimate how many fields and items a body has, including those of JSON data and of strings."""
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
            return  # the end, or not JSON, which the decoder refuses
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
