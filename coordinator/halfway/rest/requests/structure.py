"""Counts the fields and items of a JSON body before it is decoded, because each of them takes time.

JSON data of the caller stays bytes and takes almost no time, so it is not counted.
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
_TOKEN_IN_DATA: Final = re.compile(rb'[^"\[\]{}]*+(?:()([\[{])|([\]}])|()"[^"]*+")')
_MAX_DEPTH: Final = 1024
"""The decoder refuses deeper nesting."""


def weight(body: bytes) -> int:
    """Estimate how many fields and items a body has, including those of JSON data and of strings."""
    return body.count(b",") + body.count(b"{") + body.count(b"[")


async def demand_few_members(body: bytes) -> None:
    """Refuse a body with more than `MAX_MEMBERS` fields and items. Other requests can run during the count.

    Raises:
        InvalidRequestError: the body has more.

    """
    if body.count(b",") <= MAX_MEMBERS:
        return
    await asyncio.sleep(0)
    plain = body.replace(b"\\\\", b"")
    await asyncio.sleep(0)
    plain = plain.replace(b'\\"', b"")
    members = tokens = position = depth = 0
    data_depth: int | None = None
    while depth <= _MAX_DEPTH:
        token = (_TOKEN if data_depth is None else _TOKEN_IN_DATA).match(plain, position)
        if token is None:
            return  # the end, or not JSON, which the decoder refuses
        position = token.end()
        data, opening, closing, comma = token.groups()
        if closing is not None:
            depth -= 1
            if data_depth == depth:
                data_depth = None
        elif data or opening is not None:
            data_depth = depth if data else data_depth
            depth += 1
        elif comma:
            members += 1
            if members > MAX_MEMBERS:
                raise invalid([("", f"more than {MAX_MEMBERS} fields and items in one body: send fewer at once")])
        tokens += 1
        if tokens % _SLICE == 0:
            await asyncio.sleep(0)
