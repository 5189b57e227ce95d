"""Where settings come from, and which are wrong: the name, the place in the file if it is from there, a remedy.

A secret `x` can be in a file, such as one that a secret store mounts: the setting `x_file` names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args

import msgspec
from pydantic import ConfigDict, Field, GetPydanticSchema, SecretStr, ValidationError, create_model
from pydantic_core.core_schema import no_info_after_validator_function

from halfway.protocol.records import CheckPolicy, LimitOverrides

PREFIX: Final = "HALFWAY_"
SHOWN: Final = 80
"""Shown characters of a value."""
KAFKA_PREFIX: Final = "HALFWAY_KAFKA__"
_WORD: Final = re.compile(r"[a-z_.]+")
_QUOTED: Final = re.compile(r"'[^']*'")
"""A value in an error; a path may contain the name of a setting."""


REMOVED: Final[Mapping[str, str]] = {
    "audit_retention_ms": "90 days for a new topic; set retention.ms of the topic itself",
    "audit_topic": "true",
    "check_bytes": "64 MiB",
    "check_connect_timeout_s": "three tenths of HALFWAY_CHECK_TIMEOUT_S",
    "check_host_rate": "64 times HALFWAY_CHECK_CONCURRENCY",
    "check_queue": "64 times HALFWAY_CHECK_CONCURRENCY",
    "check_private_networks": "true; HALFWAY_CHECK_NETWORKS=public closes private networks",
    "group_bytes_in_flight": "HALFWAY_LIMITS__BYTES_IN_FLIGHT",
    "group_max_pending": "HALFWAY_LIMITS__PENDING",
    "group_prepares_per_s": "HALFWAY_LIMITS__PREPARES_PER_S",
    "lane_max_bytes": "16 MiB",
    "lane_max_ends": "1,000",
    "lane_queue": "10,000",
    "lane_queue_bytes": "256 MiB",
    "lane_stall_s": "30 s, but at most two thirds of HALFWAY_TRANSACTION_TIMEOUT_S",
    "log_format": "json, and readable text on a terminal",
    "max_batch_items": "1,000",
    "max_body_bytes": "twice HALFWAY_MAX_PREPARE_BYTES",
    "max_compaction_lag_ms": "8 times HALFWAY_OUTCOME_HORIZON_S, at most the longer of 2 hours and twice it",
    "max_groups": "4,000",
    "max_keys": "10,000",
    "max_messages": "one for each 4 KiB of HALFWAY_MAX_PREPARE_BYTES, but at least 1,000",
    "min_compaction_lag_ms": "HALFWAY_OUTCOME_HORIZON_S",
    "open_metrics": "HALFWAY_OPEN_ACCESS=metrics",
    "peer_credential_previous": "the second one in HALFWAY_PEER_CREDENTIAL",
    "peer_credential_previous_file": "the second one in HALFWAY_PEER_CREDENTIAL",
    "prepare_timeout_s": "5 s, but at most a third of HALFWAY_REQUEST_TIMEOUT_S",
    "prepare_wait_s": "1 s",
    "reanchor_after": "a twentieth of HALFWAY_MAX_OUTCOMES_PER_SHARD",
    "scan_interval_s": "1 s, or HALFWAY_MIN_CHECK_INTERVAL_S if that is shorter",
    "segment_ms": "1 hour, but at most 4 times HALFWAY_OUTCOME_HORIZON_S",
    "shutdown_timeout_s": "20 s",
}
"""What earlier releases could set, with the value that it has now: it is ignored, with a warning, at a start."""


TRUTH: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
"""What a variable may say for true and for false."""
_RENAMED: Final[Mapping[str, tuple[bool, str, str]]] = {
    "check_private_networks": (False, "check_networks", "public"),
    "open_metrics": (True, "open_access", "metrics"),
}
"""Removed settings that another one has taken over: at which value, and what that is there."""
_MOVED: Final[Mapping[str, str]] = {
    "group_bytes_in_flight": "bytes_in_flight",
    "group_max_pending": "pending",
    "group_prepares_per_s": "prepares_per_s",
}
"""Removed settings whose values are now in `limits`, under these names."""


def rename(values: dict[str, Any], plain: Mapping[str, str]) -> list[str]:
    """Give the values of renamed settings to the new ones, unless these say more; return what is wrong with them.

    `plain` maps the names in `values` to those of settings.
    """
    given = {plain[name]: (name, value) for name, value in values.items()}
    faults: list[str] = []
    for old, (at, new, value) in _RENAMED.items():
        if old not in given:
            continue
        said = TRUTH.get(str(given[old][1]).lower())
        name, set_to = given.get(new, (new, None))
        if said is None:
            faults.append(f"{old} is {str(given[old][1])[:SHOWN]!r}: it must be true or false; {new} has taken it over")
        elif said is at and (set_to in (None, "", [], ()) or TRUTH.get(str(set_to).lower()) is False):
            values[name] = value
    if moved := {new: given[old][1] for old, new in _MOVED.items() if old in given}:
        values["limits"] = moved | dict(values.get("limits") or {})
    return faults


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
        variable = PREFIX + "__".join(path).removeprefix(PREFIX).upper()
        value = _value(sources.others, path)
        in_file = None
        if value is None and sources.file is not None:
            value = _value(sources.in_file, path)
            in_file = f"{'.'.join(path)} in {str(sources.file)!r}"
        name = variable
        if problem["type"] == "extra_forbidden":
            fault = "not a setting of halfway; remove it or correct its name (docs/operating.md lists all settings)"
            near = suggest(variable)
            if near is not None:
                name = f"{variable} (did you mean {near}?)"
                if in_file is not None and (meant := SECTION_VARIABLES.get(near) or variables.get(near)):
                    in_file = f"{in_file}, did you mean {'.'.join(meant)}?"
        # What is not a setting may be the misspelt name of a secret, and a value may be that of a removed setting.
        if value is not None and path[0] != "kafka" and path[0] not in secrets and problem["type"] != "extra_forbidden":
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


SUFFIX: Final = "_file"
KAFKA_SECRETS: Final = (
    "sasl.password",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
)
"""The properties of librdkafka that are secrets, and have no property of their own that names a file."""
_KAFKA_SUFFIX: Final = ".file"


class SecretInFile(SecretStr):
    """A secret that was read from a file."""

    def __init__(self, path: str) -> None:
        """Read it; raise ValueError with the reason if that fails."""
        super().__init__(content_of(path))
        self.path = path


def secret_name(settings: object, name: str) -> str:
    """Return the setting that gave a secret, for an error: that of its file, with the path, if it is from one."""
    value = getattr(settings, name)
    return f"{name}{SUFFIX} {value.path!r}" if isinstance(value, SecretInFile) else name


def content_of(path: str) -> str:
    """Return the secret in a file, without white space around it; raise ValueError with the reason if that fails.

    A master secret may be any bytes. Whatever else is not text is refused where it is used.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path has a null character
        raise ValueError(getattr(error, "strerror", None) or "it is not a path") from None
    return content.strip().decode("utf-8", "surrogateescape")


def read_secrets(values: Mapping[str, Any], secrets: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of settings with each secret that is in a file, and what is wrong with the others."""
    found = dict(values)
    faults = [_read(found, name, name + SUFFIX, "") for name in secrets]
    if isinstance(found.get("kafka"), Mapping):
        properties = dict(found["kafka"])
        faults += [_read(properties, name, name + _KAFKA_SUFFIX, "kafka.") for name in KAFKA_SECRETS]
        found["kafka"] = properties
    return found, [fault for fault in faults if fault is not None]


def _read(values: dict[str, Any], name: str, file_name: str, section: str) -> str | None:
    path = values.pop(file_name, None)
    if path is None:
        return None
    if values.get(name) is not None:
        return f"{section}{name} and {section}{file_name} are both set: set one of them"
    try:
        values[name] = SecretInFile(str(path))
    except ValueError as error:
        return f"cannot read {section}{file_name} {str(path)!r}: {error}"
    return None


def _field(field: msgspec.structs.FieldInfo) -> tuple[Any, Any]:
    """Return the pydantic type of a field, with its bounds, and its default."""
    kind: Any = next(iter(get_args(field.type)), field.type) if field.default is None else field.type
    kind, *metas = get_args(kind) or (kind,)
    bounds = [Field(gt=meta.gt, ge=meta.ge, le=meta.le) for meta in metas]
    bounded = Annotated[kind, *bounds] if bounds else kind
    return (bounded if field.default is not None else bounded | None), field.default


def _schema_of(struct: type[msgspec.Struct]) -> GetPydanticSchema:
    """Return how pydantic reads a section of the settings: with the fields and the bounds of a struct."""
    fields: Any = create_model(
        struct.__name__,
        __config__=ConfigDict(extra="forbid", allow_inf_nan=False),
        **dict[str, Any]({field.name: _field(field) for field in msgspec.structs.fields(struct)}),
    )
    return GetPydanticSchema(
        lambda _, handler: no_info_after_validator_function(
            lambda given: struct(**dict(given)), handler.generate_schema(fields)
        )
    )


Policy = Annotated[CheckPolicy, _schema_of(CheckPolicy)]
Limits = Annotated[LimitOverrides, _schema_of(LimitOverrides)]
SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {"policy": CheckPolicy, "limits": LimitOverrides}
"""Settings that are sections: their variables are `HALFWAY_<SECTION>__<FIELD>`."""
SECTION_VARIABLES: Final = {PREFIX + name.upper(): (name,) for name in ("kafka", *SECTIONS)}
"""What the name of a section is near to, if it is misspelt."""
