"""Bodies that take as long to read and to judge as any of their size, each with the path that it is sent to."""

LIMIT = 8 * 1024 * 1024
"""What a body may have by default."""

PREPARE = b'{"group":"shop","messages":['
SMALL = b'{"topic":"orders","value":""}'


def filled(head: bytes, item: bytes, tail: bytes, size: int = LIMIT) -> bytes:
    """Give a body of a size with as many items as fit into it."""
    items = (item + b",") * ((size - len(head) - len(tail)) // (len(item) + 1))
    return head + items[:-1] + tail


def batch_of(*items: bytes) -> bytes:
    return b'{"prepare":[' + b",".join(items) + b"]}"


WORST: dict[str, tuple[str, bytes]] = {
    "a prepare of small messages": ("/v1/transactions", filled(PREPARE, SMALL, b"]}")),
    "as many small messages as may be": ("/v1/transactions", filled(PREPARE, SMALL, b"]}", 12_450 * 30)),
    "as many small headers as may be": (
        "/v1/transactions",
        filled(PREPARE + b'{"topic":"orders","value":"","headers":[', b'{"name":"a"}', b"]}]}", 24_900 * 13),
    ),
    "a prepare of small headers": (
        "/v1/transactions",
        filled(PREPARE + b'{"topic":"orders","value":"","headers":[', b'{"name":"a"}', b"]}]}"),
    ),
    "a header that names itself again and again": (
        "/v1/transactions",
        filled(PREPARE + b'{"topic":"orders","value":"","headers":[{', b'"name":"a"', b"}]}]}"),
    ),
    "small messages and one that is wrong": ("/v1/transactions", filled(PREPARE, SMALL, b',{"topic":1}]}', 512 * 1024)),
    "free data that is wrong at its end": (
        "/v1/transactions",
        filled(PREPARE + b'{"topic":"orders","value":{"type":"JSON","data":[', b"{}", b"]}}]", 1024 * 1024),
    ),
    "free data that repeats the names of fields": (
        "/v1/transactions",
        filled(
            PREPARE + b'{"topic":"orders","value":{"type":"JSON","data":[', b'{"topic":1}', b"]}}]}", 1024 * 1024 - 1
        ),
    ),
    "a value of escapes": (
        "/v1/transactions",
        PREPARE + b'{"topic":"orders","value":"' + b"\\u0001" * 600_000 + b'"}]}',
    ),
    "nested without end": ("/v1/transactions", PREPARE + b"[" * (LIMIT - 100)),
    "blanks": ("/v1/transactions", PREPARE + SMALL + b"," * 25_001 + b" " * (LIMIT - 30_000)),
    "a batch of numbers": ("/v1/batch", filled(b'{"prepare":[', b"1", b"]}")),
    "a batch of empty objects": ("/v1/batch", filled(b'{"end":[', b"{}", b"]}")),
    "a batch of items with one wrong message": (
        "/v1/batch",
        batch_of(*[filled(PREPARE, SMALL, b',{"topic":1}]}', 500 * 1024)] * 14),
    ),
    "a batch of many wrong items": ("/v1/batch", batch_of(*[filled(PREPARE, SMALL, b',{"topic":1}]}', 1000)] * 1000)),
    "a batch whose items repeat names": (
        "/v1/batch",
        batch_of(
            *[filled(PREPARE + b'{"topic":"orders","value":{"type":"JSON","data":[', b'{"topic":1}', b"]}}]}", 200_000)]
            * 10
        ),
    ),
    "an end with a body of another kind": ("/v1/transactions/x/end", filled(b'{"outcome":[', b"1", b"]}")),
    "an end that says it again and again": ("/v1/transactions/x/end", filled(b"{", b'"outcome":"commit"', b"}")),
    "a resume with fields": ("/v1/transactions/x/resume", filled(b"[", b"1", b"]")),
    "a group of topics": ("/v1/groups/shop", filled(b'{"check":{"mode":"pull"},"topics":[', b'"a"', b"]}")),
}
