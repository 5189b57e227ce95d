"""Decides which URLs halfway can call at all; `checks/destinations.py` applies the operator's rules to them."""

from __future__ import annotations

import re
from typing import Final

from yarl import URL

_NOT_PRINTED: Final = re.compile(r"[\x00-\x20\x7f]")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|\[[A-Za-z0-9:.%_-]+\]")


def url_refusal(text: str) -> str | None:
    """Return why a URL cannot be called, None if it can. The reason is shown to users and holds no secret."""
    if _NOT_PRINTED.search(text) is not None:
        return "a URL must not have spaces or control characters"
    try:
        url = URL(text)
        port = url.port
    except ValueError:
        return "the URL cannot be read"
    if url.scheme not in ("http", "https"):
        return f"the URL's scheme is {url.scheme!r}, not http or https"
    if url.user is not None or url.password is not None:
        return "the URL has a user name or password in it"
    if not url.host or not port:
        return "the URL has no host, or port 0"
    # A proxy may decode any other host, and call one that was not checked.
    return None if _HOST.fullmatch(url.host_subcomponent or "") else "the URL's host is neither a name nor an address"


def base_url_refusal(text: str) -> str | None:
    """Return why paths cannot be appended to a URL, None if they can."""
    refusal = url_refusal(text)
    if refusal is None and (URL(text).raw_query_string or URL(text).raw_fragment):
        return "the URL has a query or a fragment"
    return refusal


def proxy_refusal(text: str) -> str | None:
    """Return why a URL cannot be that of an HTTP proxy, None if it can. It may have a user name and a password."""
    try:
        anonymous = str(URL(text).with_user(None))
    except ValueError:
        return "it cannot be read"
    return base_url_refusal(anonymous)
