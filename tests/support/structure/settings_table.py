"""The table of settings in docs/operating.md: `python -m tests.support.structure.settings_table` writes it."""

import ast
import inspect
import textwrap
from pathlib import Path

from halfway.app.settings import VARIABLES, Settings
from halfway.app.settings_sources import SECTIONS

PAGE = Path(__file__).parents[3] / "docs" / "operating.md"
FIRST, LAST = "| variable | default | |\n| --- | --- | --- |\n", "\n\n<!-- end of the settings -->"


def meanings() -> dict[str, str]:
    """Return the text below each setting, from the classes that declare one."""
    found = {}
    for one in Settings.__mro__:
        if one.__module__.startswith("halfway."):
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = text.value if isinstance(text, ast.Expr) else None
                    found[field.target.id] = str(value.value) if isinstance(value, ast.Constant) else ""
    return found


def _shown(default: object) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return (
        f"{default:,}"
        if isinstance(default, int) and default > 10_000
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )


def table() -> str:
    """Return the rows, those of a secret with a mark: it may be in a file."""
    told, rows = meanings(), []
    for name, field in Settings.model_fields.items():
        if name not in {"kafka", *SECTIONS}:
            mark = "†" if f"HALFWAY_{name.upper()}_FILE" in VARIABLES else ""
            rows.append(f"| `HALFWAY_{name.upper()}`{mark} | {_shown(field.default)} | {told[name].rstrip('.')} |")
    return "\n".join(sorted(rows))


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(FIRST)
    PAGE.write_text(before + FIRST + table() + LAST + rest.partition(LAST)[2], encoding="utf-8")
