"""Build both distributions and import every portion of the namespace from them, in fresh environments elsewhere.

A wheel that is built from a source distribution holds the same as one that is built from the source tree.
`halfway` holds everything but the client; `halfway-client` holds the client alone and installs with little else.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYER_FOLDERS = ("adapters", "coordinator", "pipeline", "schemas")
DATA_SUFFIXES = {".avsc", ".css", ".html", ".js", ".md", ".py", ".sql", ".svg", ".txt", ".typed"}
# The portions that need an extra, and the lock that holds it; the last needs the client beside it.
LOCK_OF_PORTION = {"halfway.embedded": "embedded", "halfway.pipeline": "all", "halfway.testing": "all"}
CLIENT = "halfway/client/"
# The modules of the client that need an extra of its distribution.
CLIENT_EXTRAS = {
    "consumer": "halfway.client.consumer",
    "django": "halfway.client.django",
    "sqlalchemy": "halfway.client.sqlalchemy",
}
CLIENT_PROJECT = ROOT / "packaging" / "client"
CLIENT_TRIAL = """
import importlib, importlib.util, sqlite3, sys
from halfway.client import Message, SyncHalfway
from halfway.client.barrier import Barrier, sqlite_transactions

assert importlib.util.find_spec("halfway.coordinator") is None and importlib.util.find_spec("confluent_kafka") is None
begin = sqlite_transactions("trial.sqlite")
barrier = Barrier("sqlite", begin)
barrier.create()
with SyncHalfway(sys.argv[1], "shop", barrier=barrier) as client:
    client.start(topics=["orders"])
    with client.transaction([Message(topic="orders", value="paid")]) as transaction, begin() as connection:
        barrier.insert(connection, transaction.id)
    assert barrier.look(transaction.id) == "commit"
try:
    importlib.import_module("halfway.client.consumer")
except ModuleNotFoundError as error:
    assert "halfway-client[consumer]" in str(error)
"""
# A halfway in memory for the client, until standard input is closed; it fails unless the client has committed then.
SERVER = """
import sys
from halfway.testing import MemoryServer

with MemoryServer() as server:
    server.create_topic("orders")
    print(server.url, flush=True)
    sys.stdin.read()
    assert [record.value for record in server.records("orders")] == [b"paid"]
"""
UV = Path(sys.executable).with_name("uv")


def run(*command: str | Path, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True)


def expected_files() -> set[str]:
    return {
        path.relative_to(ROOT / folder).as_posix()
        for folder in LAYER_FOLDERS
        for path in (ROOT / folder).glob("halfway/**/*")
        if path.suffix in DATA_SUFFIXES
    }


def check_contents(wheel: Path, expected: set[str]) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if names != expected:
        sys.exit(f"{wheel.name}: missing {sorted(expected - names)}, not expected {sorted(names - expected)}")
    if "halfway/__init__.py" in names:
        sys.exit("wheel: halfway is a namespace and must not have an __init__.py")


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_by_lock(files: set[str]) -> dict[str, list[str]]:
    """Give the modules to import after each lock was installed, the locks from the smallest to the largest."""
    modules = sorted(module_name(file) for file in files if file.endswith(".py"))
    found: dict[str, list[str]] = {"runtime": [], "embedded": [], "all": []}
    for module in modules:
        if not module.endswith(".__main__"):
            portion = ".".join(module.split(".")[:2])
            found[LOCK_OF_PORTION.get(portion, "runtime")].append(module)
    return {lock: modules for lock, modules in found.items() if modules}


def environment(folder: Path) -> Path:
    """Make an empty environment and return its folder of commands."""
    run(UV, "venv", "--quiet", "--python", sys.executable, folder, cwd=folder.parent)
    return folder / "bin"


def build(target: str, project: Path, there: Path) -> Path:
    """Build a `wheel` or an `sdist` of a project, and return its file."""
    there.mkdir(exist_ok=True)
    before = set(there.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", there, cwd=project)
    (built,) = set(there.iterdir()) - before
    return built


def unpacked(sdist: Path, there: Path) -> Path:
    """Unpack a source distribution outside the source tree, and return its folder."""
    with tarfile.open(sdist) as files:
        # Python before 3.11.4 knows no filter; the archive is a package that pip has verified or made.
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(there)  # noqa: S202
    return there / sdist.name.removesuffix(".tar.gz")


def try_coordinator(wheel: Path, files: set[str], client_wheel: Path, there: Path) -> Path:
    """Import everything from the wheel, and return the interpreter of its environment."""
    check_contents(wheel, files)
    bin_folder = environment(there / "venv")
    install = (UV, "pip", "install", "--quiet", "--python", bin_folder / "python")
    for lock, modules in imports_by_lock(files).items():
        lock_file = ROOT / "requirements" / f"{lock}.txt"
        run(*install, "--no-deps", "--require-hashes", "--requirement", lock_file, cwd=there)
        if lock == "runtime":
            run(*install, "--no-deps", wheel, cwd=there)
        run(UV, "pip", "check", "--quiet", "--python", bin_folder / "python", cwd=there)
        if lock == LOCK_OF_PORTION["halfway.testing"]:
            run(*install, "--no-deps", client_wheel, cwd=there)
        run(bin_folder / "python", "-I", "-W", "error", "-c", f"import {', '.join(modules)}", cwd=there)
    for command in ("halfway", "halfway-pipeline"):
        run(bin_folder / command, "--help", cwd=there)
    return bin_folder / "python"


def use_client(python: Path, server_python: Path, there: Path) -> None:
    """Commit a transaction with the installed client, at a halfway that runs in the other environment."""
    serve = (server_python, "-I", "-W", "error", "-c", SERVER)
    with subprocess.Popen(serve, cwd=there, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = next(line.strip() for line in server.stdout or () if line.startswith("http"))  # after its log
        run(python, "-I", "-W", "error", "-c", CLIENT_TRIAL, url, cwd=there)
        server.communicate()
    if server.returncode:
        sys.exit(f"{url}: what the installed client committed is not there")


def try_lowest(sdist: Path, server_python: Path, there: Path) -> None:
    """Use the client with the lowest version that it allows of what it depends on."""
    python = environment(there / "lowest-venv") / "python"
    run(UV, "pip", "install", "--quiet", "--python", python, "--resolution", "lowest-direct", sdist, cwd=there)
    use_client(python, server_python, there)


def try_client(sdist: Path, wheel: Path, files: set[str], server_python: Path, there: Path) -> None:
    """Install the client with its own dependencies, use it where nothing of the coordinator is, then add its extras."""
    check_contents(wheel, files)
    bin_folder = environment(there / "client-venv")
    constraint = ROOT / "requirements" / "all.txt"
    modules = {module_name(file) for file in files if file.endswith(".py")}
    of_extras = {
        extra: {module for module in modules if module.startswith(portion)} for extra, portion in CLIENT_EXTRAS.items()
    }

    def install(extra: str, modules: set[str]) -> None:
        wanted = f"{wheel if extra else sdist}{extra}"
        command = (UV, "pip", "install", "--quiet", "--python", bin_folder / "python", "--constraint", constraint)
        run(*command, wanted, cwd=there)
        run(bin_folder / "python", "-I", "-W", "error", "-c", f"import {', '.join(sorted(modules))}", cwd=there)

    install("", modules.difference(*of_extras.values()))
    use_client(bin_folder / "python", server_python, there)
    for extra, its_modules in of_extras.items():
        install(f"[{extra}]", its_modules)


def main() -> None:
    files = expected_files()
    client_files = {file for file in files if file.startswith(CLIENT)}
    with tempfile.TemporaryDirectory(prefix="halfway-wheel-") as scratch:
        there = Path(scratch)
        wheel, client_wheel = build("wheel", ROOT, there), build("wheel", CLIENT_PROJECT, there)
        if wheel.name.split("-")[1] != client_wheel.name.split("-")[1]:
            sys.exit(f"{wheel.name} and {client_wheel.name}: give both projects one version")
        sdist, client_sdist = build("sdist", ROOT, there), build("sdist", CLIENT_PROJECT, there)
        for packed, expected in ((sdist, files - client_files), (client_sdist, client_files)):
            check_contents(build("wheel", unpacked(packed, there), there / "again"), expected)
        server_python = try_coordinator(wheel, files - client_files, client_wheel, there)
        try_client(client_sdist, client_wheel, client_files, server_python, there)
        try_lowest(client_sdist, server_python, there)
    print(f"{wheel.name}, {client_wheel.name}: {len(files)} files; every module was imported from them")


if __name__ == "__main__":
    main()
