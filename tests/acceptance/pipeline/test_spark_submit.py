"""The jobs with spark-submit on a cluster of processes: dependencies are shipped, the rows are the same."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark
import pytest

import halfway.pipeline
from tests.support.pipeline.archives import HISTORY, verdicts_in, verdicts_of, write_archive
from tests.support.pipeline.fixtures import INTERPRETED, QUICK_JVM, as_options, without_spark

ROOT = Path(__file__).resolve().parents[3]
SPARK = Path(pyspark.__file__).parent
PROGRAM = Path(halfway.pipeline.__path__[0], "__main__.py")
FOUND = {"committed_ok": 200, "lost": 2, "doubled": 1}
EXPECTED = verdicts_of(**HISTORY)
"""The same result as in a local session, where test_pipeline_cli.py runs the same job."""

# Sequentially, with the tests that share a session.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.xdist_group("spark-submit")]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the output of `make pack`."""
    folder = tmp_path_factory.mktemp("packed")
    # In the environment of the tests, which has the dependencies.
    environment = (f"BIN={Path(sys.executable).parent}", "STAMP=", f"PACKED={folder}")
    subprocess.run(["make", "pack", *environment], cwd=ROOT, check=True, timeout=1200)
    return folder


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submitted") / "snapshot"
    write_archive(folder, **HISTORY)
    return folder


def spark_submit(
    workers: int, given: list[str], job: list[str], settings: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Submit a job to a master with workers of one core each, in separate processes, as a user would."""
    conf = {
        "spark.executor.extraJavaOptions": QUICK_JVM,
        "spark.pyspark.driver.python": sys.executable,
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        **settings,
    }
    return subprocess.run(
        [
            str(SPARK / "bin" / "spark-submit"),
            *("--master", f"local-cluster[{workers},1,1024]", "--driver-java-options", QUICK_JVM),
            *as_options(conf),
            *given,
            str(PROGRAM),
            *job,
        ],
        env={**without_spark(), "SPARK_HOME": str(SPARK), "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def audited(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return the counts of an audit that has found the planted anomalies."""
    assert done.returncode == 1, done.stderr[-10_000:]
    return {name: count for name, count in json.loads(done.stdout).items() if count}


def test_two_workers_with_a_packed_environment_give_the_rows_of_a_local_session(
    snapshot: Path, packed: Path, tmp_path: Path
) -> None:
    """Python and its packages come with --archives: halfway is not installed on the workers."""
    given = ["--archives", f"{packed / 'halfway-spark.tar.gz'}#halfway"]
    job = ["audit", "--snapshot", str(snapshot), "--output", str(tmp_path), "--json"]
    done = spark_submit(2, given, job, {"spark.pyspark.python": "./halfway/bin/python"})
    assert audited(done) == FOUND
    assert verdicts_in(tmp_path) == EXPECTED


def test_a_zip_is_enough_where_the_workers_have_pyarrow(snapshot: Path, packed: Path, tmp_path: Path) -> None:
    """--py-files ships plain Python: the jobs, and the decoder without its compiled part."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    uv, lock = Path(sys.executable).with_name("uv"), ROOT / "requirements" / "cluster.txt"
    install = [str(uv), "pip", "install", "--quiet", "--python", str(bare), "--constraint", str(lock), "pyarrow"]
    subprocess.run(install, check=True, timeout=1200)
    given = ["--py-files", str(packed / "halfway-spark.zip")]
    job = ["audit", "--snapshot", str(snapshot), "--output", str(tmp_path / "audit"), "--json"]
    done = spark_submit(1, given, job, {**INTERPRETED, "spark.pyspark.python": str(bare / "bin" / "python")})
    assert audited(done) == FOUND
    assert verdicts_in(tmp_path / "audit") == EXPECTED
