"""YARN of processes on this machine: a resource manager and a node manager, from the artifacts of Hadoop's tests."""

import subprocess
import sys
from pathlib import Path
from typing import Final, Self

import jgo

from halfway.embedded.broker import pick_port
from tests.support.pipeline.cluster import COMMON, PACKAGES, PROGRAM, SPARK
from tests.support.pipeline.fixtures import QUICK_JVM, as_options, without_spark

_ARTIFACTS: Final = (
    "org.apache.hadoop:hadoop-client-minicluster:3.4.1",
    "org.bouncycastle:bcpkix-jdk18on:1.78.1",
    "javax.xml.bind:jaxb-api:2.3.1",
    "com.sun.xml.bind:jaxb-impl:2.3.9",
)
"""Hadoop as PySpark 4.0 has it. It asks for the others, which no JDK has any more."""
_SETTINGS: Final = {
    "yarn.nodemanager.address": "127.0.0.1:0",
    "yarn.nodemanager.disk-health-checker.enable": "false",
    "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100.0",
    "yarn.nodemanager.hostname": "127.0.0.1",
    "yarn.nodemanager.resource.cpu-vcores": "4",
    "yarn.nodemanager.resource.memory-mb": "6000",
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.webapp.address": "127.0.0.1:0",
    "yarn.resourcemanager.hostname": "127.0.0.1",
    "yarn.resourcemanager.scheduler.class": (
        "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler"
    ),
    "yarn.scheduler.minimum-allocation-mb": "256",
}
_ADDRESSES: Final = (
    *(f"yarn.resourcemanager.{name}address" for name in ("", "scheduler.", "resource-tracker.", "admin.", "webapp.")),
    *(f"yarn.nodemanager.{name}.address" for name in ("localizer", "collector-service")),
)
ON_YARN: Final = {
    **COMMON,
    "spark.driver.memory": "600m",
    "spark.driver.memoryOverhead": "256m",
    "spark.executor.instances": "2",
    "spark.executor.memoryOverhead": "256m",
    "spark.master": "yarn",
    "spark.sql.shuffle.partitions": "3",
    "spark.submit.deployMode": "cluster",
    "spark.yarn.appMasterEnv.PYSPARK_PYTHON": sys.executable,
    "spark.yarn.jars": f"local:{SPARK}/jars/*",
    "spark.yarn.maxAppAttempts": "1",
}


class Yarn:
    """Start it with `with`."""

    def __init__(self, folder: Path) -> None:
        """Take a folder for everything."""
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start the processes. Spark's client waits for them."""
        taken: set[int] = set()
        for _ in _ADDRESSES:
            taken.add(pick_port(taken))
        settings = _SETTINGS | {name: f"127.0.0.1:{port}" for name, port in zip(_ADDRESSES, taken, strict=True)}
        settings |= {f"yarn.nodemanager.{name}-dirs": str(self.folder / name) for name in ("local", "log")}
        for file, content in (("core-site", {"fs.defaultFS": "file:///"}), ("yarn-site", settings)):
            lines = (
                f"<property><name>{name}</name><value>{value}</value></property>" for name, value in content.items()
            )
            (self.folder / f"{file}.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")
        jars = {jar.name: str(jar) for each in _ARTIFACTS for jar in jgo.build(each).all_jars}
        path = ":".join([str(self.folder), *jars.values(), f"{SPARK}/jars/*"])
        for program in ("resourcemanager.ResourceManager", "nodemanager.NodeManager"):
            command = ["java", *QUICK_JVM.split(), "-Xmx256m", "--add-opens", "java.base/java.lang=ALL-UNNAMED"]
            with (self.folder / f"{program}.log").open("wb") as log:
                started = subprocess.Popen(
                    [*command, "-cp", path, f"org.apache.hadoop.yarn.server.{program}"],
                    env=without_spark(),
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(started)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything. A node manager that is told to stop ends its containers."""
        for process in reversed(self._processes):
            process.terminate()
            process.wait()

    def submit(self, *job: str) -> tuple[int, str]:
        """Submit a job in cluster mode; return the exit status, and what the containers have printed."""
        events = self.folder / "events"
        events.mkdir()
        places = {"spark.eventLog.dir": events.as_uri(), "spark.yarn.stagingDir": (self.folder / "staging").as_uri()}
        submitted = subprocess.run(
            [str(SPARK / "bin" / "spark-submit"), *PACKAGES, *as_options(ON_YARN | places), str(PROGRAM), *job],
            env={**without_spark(), "SPARK_HOME": str(SPARK), "HADOOP_CONF_DIR": str(self.folder)},
            capture_output=True,
            timeout=1200,
            check=False,
        )
        told = [file.read_text() for file in sorted((self.folder / "log").rglob("std*"))]
        return submitted.returncode, "\n".join([*told, submitted.stderr.decode()[-4_000:]])
