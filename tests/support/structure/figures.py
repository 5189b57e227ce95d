"""Measures the size and the shape of the code: `python -m tests.support.structure.figures` prints every figure."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from halfway.app.settings import Settings
from halfway.coordinator import records
from halfway.http.handlers.routes import OPERATIONS

ROOT = Path(__file__).parents[3]
PORTIONS = ("coordinator", "adapters", "pipeline", "schemas")
PORTS = ("coordinator/halfway/coordinator/ports.py",)


def product_files() -> dict[str, Path]:
    """Give the product's modules by their dotted names."""
    found = {}
    for portion in PORTIONS:
        for path in (ROOT / portion).glob("halfway/**/*.py"):
            found[".".join(path.relative_to(ROOT / portion).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _lines(paths: Iterator[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _packages() -> dict[str, int]:
    figures: Counter[str] = Counter()
    for name, path in product_files().items():
        package = "/".join(name.split(".")[:2])
        figures[f"lines of {package}"] += _lines(iter([path]))
        figures[f"files of {package}"] += 1
    return dict(figures)


def _imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that one module imports anywhere: in functions and for type checkers too."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {one for one in found & modules.keys() if one != name}


def modules_in_circles() -> list[str]:
    """Return the modules that import each other in a circle, in order of their names."""
    modules = product_files()
    graph = {name: _imported(name, path, modules) for name, path in modules.items()}
    circles: set[str] = set()
    while True:
        # What is in a circle is taken out arrow by arrow: each error names one circle.
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1]
            circles |= set(circle)
            graph[circle[1]] = graph[circle[1]] - {circle[0]}
        else:
            return sorted(circles)


def ports() -> tuple[int, int]:
    """Return how many ports the service has, and their methods."""
    classes = [
        node
        for file in PORTS
        for node in _tree(ROOT / file).body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    ]
    methods = [
        part for one in classes for part in one.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return len(classes), len(methods)


def definitions(modules: set[str]) -> Counter[str]:
    """Count by name the functions and methods that these modules define."""
    paths = product_files()
    return Counter(
        node.name
        for name in modules & paths.keys()
        for node in ast.walk(_tree(paths[name]))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


@cache
def static_figures() -> dict[str, int]:
    """Return every figure that needs no running coordinator."""
    files = product_files()
    house = [path for path in files.values() if path.relative_to(ROOT).parts[0] in {"coordinator", "adapters"}]
    port_count, port_methods = ports()
    return _packages() | {
        "lines of coordinator and adapters": _lines(iter(house)),
        "files of coordinator and adapters": len(house),
        "lines of tests": _lines((ROOT / "tests").rglob("*.py")),
        "lines of bench": _lines((ROOT / "bench").rglob("*.py")),
        "bytes of pages": sum(page.stat().st_size for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]),
        "settings": len(Settings.model_fields),
        "REST operations": len(OPERATIONS),
        "calls between instances": sum(
            isinstance(one, type) and name.endswith("Call") for name, one in vars(records).items()
        ),
        "ports": port_count,
        "methods of ports": port_methods,
        "modules in circles": len(modules_in_circles()),
    }


if __name__ == "__main__":
    for figure, number in static_figures().items():
        print(f"{number:8} {figure}")  # noqa: T201
    print(*modules_in_circles(), sep="\n")  # noqa: T201
