"""Copies Kafka's jars and its command line tools into a folder: fetch_kafka.py FOLDER."""

import shutil
import sys
from pathlib import Path

from jgo.config import GlobalSettings
from jgo.constants import MAVEN_CENTRAL_URL
from jgo.maven import MavenContext

from halfway.embedded import KAFKA_VERSION, resolve_jars

target = Path(sys.argv[1])
target.mkdir(parents=True, exist_ok=True)
settings = GlobalSettings.load()
repositories = {"central": MAVEN_CENTRAL_URL, **settings.repositories}
context = MavenContext(repo_cache=settings.repo_cache, remote_repos=repositories)
tools = context.create_dependency(f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}").artifact.resolve()
for jar in (*resolve_jars(), tools):
    shutil.copy(jar, target)
