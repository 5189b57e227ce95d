"""What can be told of a record from its key, headers and timestamp, without decoding its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COMMITTED: Final = "committed"
ROLLED_BACK: Final = "rolled_back"
FINAL: Final = (COMMITTED, ROLLED_BACK)
"""What `halfway-state` says on an op that is an outcome."""
_NO_TRANSACTION: Final = ("barrier", "layout")
_ID: Final = r"\A[A-Za-z0-9._~-]{1,128}\z"
SERVER_MADE: Final = r"\A(0|[1-9][0-9]{0,4})-[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\z"
"""Ids that halfway made: never used twice."""
_PLACE: Final = r"\A([1-9][0-9]{0,8})/([1-9][0-9]{0,8})\z"
_HASH_DIGITS: Final = 32


def header(name: str) -> Column:
    """Return the last value of a header as text, null where there is none."""
    return F.expr(f"cast(try_element_at(filter(headers, each -> each.key = '{name}'), -1).value as string)")


def internal(records: DataFrame, kind: str | Column) -> DataFrame:
    """Return the records of half, op or parked with id, state, group, time (`at`, ms) and whether they are `alive`.

    `kind` is that of the topic, which a record's own must be. Barriers are left out. A record that halfway cannot have
    written has its `fault`; the others have null there.
    """
    told = records.select(
        F.col("key").cast("string").alias("id"),
        header("halfway-kind").alias("kind"),
        header("halfway-state").alias("state"),
        header("halfway-group").alias("group"),
        F.unix_millis("timestamp").alias("at"),
        F.col("value").isNotNull().alias("alive"),
        "value",
        "topic",
        "partition",
        "offset",
    )
    fault = (
        F.when(F.col("kind").isNull(), "no header halfway-kind")
        .when(F.col("kind") != kind, F.concat(F.lit("a record of the kind "), F.substring("kind", 1, 40)))
        .when(F.col("id").isNull(), "no key")
        .when(~F.col("id").rlike(_ID), "the key is no transaction id")
        .when(F.col("state").isNull() | F.col("group").isNull(), "no header halfway-state or halfway-group")
    )
    of_transactions = F.coalesce(~F.col("kind").isin(*_NO_TRANSACTION), F.lit(True))
    return told.where(of_transactions).withColumn("fault", fault)


def outcomes(ops: DataFrame) -> DataFrame:
    """Return the op records that are outcomes, faulty ones left out."""
    return ops.where(F.col("fault").isNull() & F.col("state").isin(*FINAL))


def messages(records: DataFrame) -> DataFrame:
    """Return the real messages that carry a transaction id: which transaction, which of its messages, which content.

    `slot` and `total` are i and n of `halfway-message: i/n`, null where the header is missing or wrong. `content`
    stands for key and value.
    """
    return (
        records.select(
            header("halfway-transaction-id").alias("id"),
            header("halfway-message").alias("place"),
            header("halfway-prepared-at").try_cast("bigint").alias("prepared_at"),
            F.unix_millis("timestamp").alias("at"),
            _digest("key").alias("key_hash"),
            content(_digest("key"), _digest("value")).alias("content"),
            "topic",
            "partition",
            "offset",
        )
        .where(F.col("id").isNotNull())
        .withColumn("slot", F.regexp_extract("place", _PLACE, 1).try_cast("int"))
        .withColumn("total", F.regexp_extract("place", _PLACE, 2).try_cast("int"))
        .withColumn("prepared_at", F.coalesce("prepared_at", "at"))
        .drop("place")
    )


def latest_of_keys(records: DataFrame) -> DataFrame:
    """Return for each topic and key (as `key_hash`) the time of its last record, null where that is not halfway's."""
    own = header("halfway-transaction-id").isNotNull()
    return (
        records.where(F.col("key").isNotNull())
        .select(
            "topic",
            _digest("key").alias("key_hash"),
            F.when(own, F.unix_millis("timestamp")).alias("at"),
            "partition",
            "offset",
        )
        .groupBy("topic", "partition", "key_hash")
        .agg(F.max_by("at", "offset").alias("at"))
        .groupBy("topic", "key_hash")
        .agg(F.when(F.count("at") == F.count(F.lit(1)), F.max("at")).alias("last_at"))
    )


def content(key_hash: Column, value_hash: Column) -> Column:
    """Return one number that stands for the hashes (hex, null for no key or no value) of a message."""
    return F.xxhash64(F.coalesce(key_hash, F.lit("-")), F.coalesce(value_hash, F.lit("-")))


def hexadecimal(hash_bytes: Column) -> Column:
    """Return a hash of an op's digest as it is compared here."""
    return F.lower(F.hex(hash_bytes))


def _digest(column: str) -> Column:
    return F.substring(F.sha2(F.col(column), 256), 1, _HASH_DIGITS)
