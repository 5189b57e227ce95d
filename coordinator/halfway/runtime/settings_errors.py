"""Explains which settings are wrong: the name, the place in the file if it is from there, the value and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

PREFIX: Final = "HALFWAY_"
SHOWN: Final = 80
"""Shown characters of a value."""
KAFKA_PREFIX: Final = "HALFWAY_KAFKA__"
_WORD: Final = re.compile(r"[a-z_.]+")
_QUOTED: Final = re.compile(r"'[^']*'")
"""A value in an error; a path may contain the name of a setting."""


class Sources(NamedTuple):
    """The values of the settings by their source. The other values override those in the file."""

    file: Path | None
    in_file: Mapping[str, Any]
    others: Mapping[str, Any]


def explain(
    error: ValidationError,
    sources: Sources,
    variables: Mapping[str, tuple[str, ...]],
    secrets: Collection[str],
    suggest: Callable[[str], str | None],
) -> str:
    """Return a text that names each wrong setting, with its value unless it is a secret, and a remedy."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        # The index within a list is not part of a variable's name.
        path = tuple(part for part in problem["loc"] if isinstance(part, str))
        fault = _plain(problem["msg"])
        if not path:
            lines += [explain_text(text, sources, variables) for text in fault.splitlines()]
            continue
        variable = PREFIX + "__".join(path).upper()
        value = _value(sources.others, path)
        in_file = None
        if value is None and sources.file is not None:
            value = _value(sources.in_file, path)
            in_file = f"{'.'.join(path)} in {str(sources.file)!r}"
        name = variable
        if problem["type"] == "extra_forbidden":
            fault = "not a setting of halfway: remove it or correct its name"
            near = suggest(variable)
            if near is not None:
                name = f"{variable} (did you mean {near}?)"
                if in_file is not None and near in variables:
                    in_file = f"{in_file}, did you mean {'.'.join(variables[near])}?"
        # What is not a setting may be the misspelt name of a secret.
        if path[0] != "kafka" and path[0] not in secrets and problem["type"] != "extra_forbidden":
            name = f"{name} is {str(value)[:SHOWN]!r}"
        lines.append(f"{name}: {fault}" if in_file is None else f"{name}: {fault} ({in_file})")
    return "; ".join(lines)


def _plain(message: str) -> str:
    """Return a message of pydantic as a remedy, without its own terms."""
    message = message.removeprefix("Value error, ").partition(", unable to ")[0]
    message = message.replace("Input should be a valid integer", "Input should be a whole number")
    message = message.replace("Input should be a valid boolean", "Input should be true or false")
    return message.replace("Input should be a valid", "it must be a").replace("Input should be", "it must be")


def with_variables(fault: str, variables: Mapping[str, tuple[str, ...]]) -> str:
    """Return a message that begins with the variables of the settings that it names as keys of the file."""
    named = _named(fault, variables)
    return f"{', '.join(named)}: {fault}" if named else fault


def explain_text(fault: str, sources: Sources, variables: Mapping[str, tuple[str, ...]]) -> str:
    """Return a message about settings with their variables, and with the keys of those that the file sets."""
    paths = _named(fault, variables).values()
    keys = [
        ".".join(path)
        for path in paths
        if _value(sources.others, path) is None and _value(sources.in_file, path) is not None
    ]
    text = with_variables(fault, variables)
    return f"{text} ({', '.join(keys)} in {str(sources.file)!r})" if keys else text


def _named(fault: str, variables: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the variables, and the paths in the file, of the settings that a message names."""
    by_key = {".".join(path): variable for variable, path in variables.items() if "_" in path[-1]}
    named: dict[str, tuple[str, ...]] = {}
    for word in _WORD.findall(_QUOTED.sub("''", fault)):
        section, _, name = word.partition(".")
        if word in by_key:
            named[by_key[word]] = variables[by_key[word]]
        elif section == "kafka" and name:
            named[KAFKA_PREFIX + name.upper().replace(".", "_")] = (section, name)
    return named


def without_credentials(url: str) -> str:
    """Return a URL without what may be a user name and a password in it, for an error."""
    before, at, after = url.rpartition("@")
    return f"{before.partition('//')[0]}//…@{after}" if at else url


def _value(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = values
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
