"""An instance that commits, leaves a Kafka transaction of its lane open, reports this, and waits to be killed.

Arguments: bootstrap servers, prefix, shards, a real topic.
"""

from __future__ import annotations

import asyncio
import sys

from halfway.kafka.clients.config import KafkaConfig
from halfway.protocol.records import Message
from tests.support.ownership.cluster_harness import Instance, commit_of, half, in_shard, prepare


async def main(bootstrap_servers: str, prefix: str, shards: str, topic: str) -> None:
    config = KafkaConfig(
        properties={"bootstrap.servers": bootstrap_servers},
        prefix=prefix,
        shards=int(shards),
        max_prepare_bytes=1_000_000,
        session_timeout_s=10,
    )
    instance = Instance(config)
    await instance.start()
    await instance.serves(range(config.shards))
    for number in range(10):
        done = half(in_shard(number % config.shards, f"done-{number}"), Message(topic=topic, value=b"done-%d" % number))
        [offset] = prepare(config, number % config.shards, done)
        await instance.write(commit_of(number % config.shards, done, offset))
    prepare(config, 0, half(in_shard(0, "pending"), Message(topic=topic, value=b"pending")))
    incarnation = instance.cluster.membership._incarnation
    assert incarnation is not None
    producer = incarnation.lane._producers[incarnation.lane._turn]
    producer.begin()
    producer.produce(config.half_topic, None, in_shard(0, "pending").encode(), 0)
    producer.produce(topic, b"never", None, 0)
    assert producer._producer is not None
    producer._producer.flush(60)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
