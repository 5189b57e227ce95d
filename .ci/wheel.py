"""Build the wheel and import every portion of the namespace from it, in a fresh environment outside the source tree."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYER_FOLDERS = ("adapters", "coordinator", "pipeline", "schemas")
DATA_SUFFIXES = {".avsc", ".html", ".md", ".py", ".typed"}
# The portions that need an extra, and the lock that holds it.
LOCK_OF_PORTION = {"halfway.embedded": "embedded", "halfway.pipeline": "all"}
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


def check_contents(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("halfway/")}
    expected = expected_files()
    if names != expected:
        sys.exit(f"wheel: missing {sorted(expected - names)}, not expected {sorted(names - expected)}")
    if "halfway/__init__.py" in names:
        sys.exit("wheel: halfway is a namespace and must not have an __init__.py")


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_by_lock() -> dict[str, list[str]]:
    """Give the modules to import after each lock was installed, the locks from the smallest to the largest."""
    modules = sorted(module_name(file) for file in expected_files() if file.endswith(".py"))
    found: dict[str, list[str]] = {"runtime": [], "embedded": [], "all": []}
    for module in modules:
        if not module.endswith(".__main__"):
            portion = ".".join(module.split(".")[:2])
            found[LOCK_OF_PORTION.get(portion, "runtime")].append(module)
    return {lock: modules for lock, modules in found.items() if modules}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="halfway-wheel-") as scratch:
        there = Path(scratch)
        run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", there, cwd=ROOT)
        (wheel,) = there.glob("*.whl")
        check_contents(wheel)
        run(UV, "venv", "--quiet", "--python", sys.executable, there / "venv", cwd=there)
        bin_folder = there / "venv" / "bin"
        install = (UV, "pip", "install", "--quiet", "--python", bin_folder / "python")
        imports = imports_by_lock()
        for lock, modules in imports.items():
            lock_file = ROOT / "requirements" / f"{lock}.txt"
            run(*install, "--require-hashes", "--requirement", lock_file, cwd=there)
            if lock == "runtime":
                run(*install, "--no-deps", wheel, cwd=there)
                run(UV, "pip", "check", "--quiet", "--python", bin_folder / "python", cwd=there)
            run(bin_folder / "python", "-I", "-W", "error", "-c", f"import {', '.join(modules)}", cwd=there)
        for command in ("halfway", "halfway-pipeline"):
            run(bin_folder / command, "--help", cwd=there)
    print(f"wheel: {wheel.name} holds {len(expected_files())} files; every module was imported from it")


if __name__ == "__main__":
    main()
