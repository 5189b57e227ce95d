"""All settings in one typed model, from a TOML file and from environment variables (`HALFWAY_…`), which override it."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FilePath,
    IPvAnyNetwork,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from halfway.app.settings_sources import (
    KAFKA_PREFIX,
    KAFKA_SECRETS,
    PREFIX,
    REMOVED,
    SECTION_VARIABLES,
    SECTIONS,
    SHOWN,
    SUFFIX,
    TRUTH,
    Limits,
    Policy,
    Sources,
    explain,
    explain_text,
    read_secrets,
    rename,
    secret_name,
    with_variables,
    without_credentials,
)
from halfway.checks.destinations import PUBLIC, Network
from halfway.coordinator.requests import Seconds, ServiceLimits, ServiceSettings
from halfway.http.requests.admission import ApiLimits, ApiSettings
from halfway.http.server.server import IDLE_S
from halfway.kafka.clients.config import (
    MAX_PREPARE_TIMEOUT_S,
    USUAL_PROPERTIES,
    KafkaConfig,
    KafkaSettings,
    variable_suffix,
)
from halfway.protocol.errors import ConfigurationError
from halfway.protocol.keys import derived, kind_in
from halfway.protocol.principal import PrincipalKind
from halfway.protocol.records import MAX_SECONDS, CheckPolicy, LimitOverrides, base_url_refusal, proxy_refusal

NOT_SETTINGS: Final = frozenset(
    {"HALFWAY_URL", "HALFWAY_HEALTH_URL", "HALFWAY_KEY", "HALFWAY_TOKEN", "HALFWAY_TOKEN_FILE", "HALFWAY_CONFIG_FILE"}
)
"""Variables of the command line and of examples/services: URLs, keys and the settings file."""
_OTHER_PREFIXES: Final = ("HALFWAY_CLIENT_", "HALFWAY_PIPELINE_", "HALFWAY_TEST_")
"""Prefixes of variables for clients, the Spark jobs and the tests, which may share the environment."""
_KAFKA_NAMES: Final = (*USUAL_PROPERTIES, *(f"{name}.file" for name in KAFKA_SECRETS))
_OF_A_SERVICE: Final = re.compile(
    r"HALFWAY(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_ADDRESS_NAME: Final = re.compile(r"HALFWAY(_[A-Z0-9]+)*_PORT")
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")
_SIMILARITY: Final = 0.85
_MIN_CREDENTIAL: Final = 16
_MIN_MASTER: Final = 32
_MAX_CREDENTIAL: Final = 512
MAX_WORKERS: Final = 64
_SHORTEST_SCAN_S: Final = 0.1

Port = Annotated[int, Field(ge=0, le=65_535)]


def _split(value: object) -> object:
    """Split the comma-separated list in a variable."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _network(value: object) -> object:
    if value == PUBLIC or isinstance(value, IPv4Network | IPv6Network):
        return value
    try:
        return ip_network(str(value))
    except ValueError as error:
        raise ValueError(f"{error}: it must be {PUBLIC} or a network such as 10.0.0.0/8") from None


def _workers(value: object) -> object:
    if value == "auto":
        return value
    number = int(value) if isinstance(value, int | str) and str(value).isdecimal() else 0
    if not 1 <= number <= MAX_WORKERS:
        raise ValueError(f"it must be auto or a number from 1 to {MAX_WORKERS}")
    return number


def _access(value: object) -> object:
    if value == "metrics" or isinstance(value, bool):
        return value
    if (known := TRUTH.get(str(value).lower())) is None:
        raise ValueError("it must be true, false or metrics")
    return known


Hosts = Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.*_:\[\]-]+$")], ...], BeforeValidator(_split)]
Networks = Annotated[tuple[IPvAnyNetwork, ...], BeforeValidator(_split)]
Reachable = Annotated[tuple[Annotated[Network | str, PlainValidator(_network)], ...], BeforeValidator(_split)]


class Settings(BaseModel, KafkaSettings, ServiceSettings, ApiSettings, frozen=True):
    """The settings; those of a part are declared by that part. Nothing declares one twice.

    A field `x_y` is the variable `HALFWAY_X_Y` and the key `x_y` of the file. A secret may be in a file instead, as
    secret stores mount it: `HALFWAY_X_Y_FILE` and `x_y_file` name the file.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    workers: Annotated[int | Literal["auto"], BeforeValidator(_workers)] = 1
    """Processes on the API's port, each an instance with its own shards; `auto`: one for each CPU."""

    kafka: dict[str, SecretStr] = {}
    """Properties of librdkafka; `HALFWAY_KAFKA__BOOTSTRAP_SERVERS` is `bootstrap.servers`."""
    kafka_prefix: str = KafkaConfig.prefix
    """The prefix of all internal topics, consumer groups and transactional ids."""

    host: str = "0.0.0.0"  # noqa: S104 - a sidecar in a container must be reachable from outside
    """The address of the API."""
    port: Port = 8080
    """The port of the API."""
    health_host: str = "0.0.0.0"  # noqa: S104
    """The address of health and metrics."""
    health_port: Port = 8081
    """The port of health and metrics."""
    instance_url: str | None = None
    """The URL at which other instances reach this one; else the address from which it reaches Kafka, and the port."""
    master_secret: SecretStr | None = None
    """The secret that others are derived from, the same everywhere, 32 bytes or more. With it callers need keys."""
    master_secret_previous: SecretStr | None = None
    """A second master secret, old or new, valid during a rotation."""
    hide_payloads_from_operators: bool = False
    """Whether operators get no messages and no checks, and cannot list by message key."""
    peer_credential: SecretStr | None = None
    """The credential between instances, the same on all. A second one after white space is accepted too."""
    peer_ca_file: FilePath | None = None
    """Certificate authorities (PEM) of the other instances' https URLs, instead of the system's."""
    tls_certificate_file: FilePath | None = None
    """The certificate chain (PEM) of the API's port. If it is set, the port speaks https only."""
    tls_key_file: FilePath | None = None
    """The key (PEM) of the certificate."""
    tls_client_ca_file: FilePath | None = None
    """The authorities (PEM) of client certificates. A client without a certificate shows a key."""
    health_tls: bool = False
    """Whether the health port speaks https too."""
    operator_key: SecretStr | None = None
    """The first operator's key, from `halfway keys generate`. It is valid as long as it is set."""
    open_access: Annotated[bool | Literal["metrics"], BeforeValidator(_access)] = False
    """Whether everybody who can reach the API may do everything; `metrics`: whether metrics alone need no key."""
    allowed_hosts: Hosts = ()
    """Host names of the API. Empty: any name, but on loopback under open access only localhost."""
    console: Literal["api", "health", "off"] = "api"
    """The port of the console and of /docs: `api`, `health` (which then serves the API too) or `off`."""
    keepalive_s: Seconds = IDLE_S
    """How long the API keeps an idle connection open: longer than your load balancer does."""
    drain_s: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = 5
    """How long an instance serves on after SIGTERM, and is not ready, before its port closes."""

    policy: Policy = CheckPolicy()
    """The default policy of groups."""
    limits: Limits = LimitOverrides()
    """The limits of a group that has none of its own."""
    check_timeout_s: Seconds = 10
    """The time-out of one check over all endpoints; connecting may take three tenths of it."""
    check_demand_nonce: bool = False
    """Whether an answer counts as a verdict only if it repeats the nonce of the check."""
    check_hosts: Hosts = ()
    """Host names that may be checked, separated by commas, `*` for any characters; empty: all."""
    check_networks: Reachable = ()
    """Allowed networks, and `public` for all public ones. Empty: private ones too, but none that is special."""
    check_also_networks: Networks = ()
    """Networks that are allowed in addition, also special ones: loopback, link-local, metadata, multicast."""
    check_proxy: SecretStr | None = None
    """The URL of an HTTP proxy for all checks."""
    check_ca_file: FilePath | None = None
    """Certificate authorities (PEM) of https endpoints, instead of the system's."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning` or `error`. The log is JSON on standard error, and readable text on a terminal."""

    _removed: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _host_credential: str | None = PrivateAttr(default=None)

    _split_skip_records = field_validator("skip_records", mode="before")(_split)

    @model_validator(mode="after")
    def _validate_combinations(self) -> Settings:
        if faults := list(self._faults()):
            raise ValueError("\n".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        if self.instance_url is not None and (refusal := base_url_refusal(self.instance_url)) is not None:
            yield f"instance_url {without_credentials(self.instance_url)[:SHOWN]!r}: {refusal}"
        if self.port and (self.host, self.port) == (self.health_host, self.health_port):
            yield f"health_port {self.health_port} is the port of the API too: choose another"
        yield from self._secret_faults()
        yield from self._tls_faults()
        contradiction = self.policy.contradiction()
        if contradiction is not None:
            yield "policy." + contradiction[1]
        if self.policy.max_age_s > (limit_s := self.max_age_limit_s):
            yield (
                f"policy.max_age_s {self.policy.max_age_s:g} is too long for op_retention_ms {self.op_retention_ms}: "
                f"at most {limit_s:g}"
            )

    def _secret_faults(self) -> Iterator[str]:
        for credential in self._set_credentials():
            if not (_MIN_CREDENTIAL <= len(credential) <= _MAX_CREDENTIAL and credential.isascii()):
                yield (
                    f"{secret_name(self, 'peer_credential')} must have {_MIN_CREDENTIAL} to {_MAX_CREDENTIAL} ASCII "
                    "characters: make it with openssl rand -hex 32"
                )
        if self.operator_key is not None:
            named = secret_name(self, "operator_key")
            if kind_in(self.operator_key.get_secret_value()) is not PrincipalKind.OPERATOR:
                yield f"{named} is not an operator's key of halfway: make one with halfway keys generate"
            elif not self.master_secrets:
                yield f"{named} has no effect without master_secret, because no keys are required: set both"
        for name in ("master_secret", "master_secret_previous"):
            master = _bytes(getattr(self, name))
            if master is not None and len(master) < _MIN_MASTER:
                yield (
                    f"{secret_name(self, name)} has {len(master)} bytes, and must have at least {_MIN_MASTER}: "
                    "make it with openssl rand -hex 32"
                )
        if self.check_proxy is not None and (reason := proxy_refusal(self.check_proxy.get_secret_value())) is not None:
            named = secret_name(self, "check_proxy")
            yield f"{named} is not the URL of an HTTP proxy such as http://proxy:3128: {reason}"

    def _tls_faults(self) -> Iterator[str]:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            yield "tls_certificate_file and tls_key_file belong together: set both or neither"
        if self.tls_certificate_file is None and (self.tls_client_ca_file is not None or self.health_tls):
            yield "tls_client_ca_file and health_tls require tls_certificate_file and tls_key_file"

    @property
    def removed(self) -> Mapping[str, str]:
        """The given settings that there are no more, each with the value that holds in its place."""
        return self._removed

    @property
    def access_control(self) -> bool:
        """Whether callers need keys."""
        return bool(self.master_secrets) and self.open_access is not True

    @property
    def peer_credentials(self) -> tuple[str, ...]:
        """The accepted credentials between instances, in the order in which this one shows them.

        Those that are configured come first, that of the workers of one host last.
        """
        of_host = () if self._host_credential is None else (self._host_credential,)
        return (*self._set_credentials(), *(derived(master, "peer").hex() for master in self.master_secrets), *of_host)

    def of_worker(self, host_credential: str) -> Self:
        """Return the settings of a worker, whose supervisor made a credential for the workers of its host.

        They share no other one while a reload sets the first, and some of them do not have it yet.
        """
        settings = self.model_copy()
        settings._host_credential = host_credential  # type: ignore[misc]  # noqa: SLF001 - as above
        return settings

    def _set_credentials(self) -> list[str]:
        if self.peer_credential is None:
            return []
        text = self.peer_credential.get_secret_value()
        parts = text.split()
        # A pass phrase of short words is one credential.
        return parts if parts and min(map(len, parts)) >= _MIN_CREDENTIAL else [text]

    @cached_property
    def master_secrets(self) -> tuple[bytes, ...]:
        """The master secrets, newest first."""
        both = (_bytes(self.master_secret), _bytes(self.master_secret_previous))
        return tuple(secret for secret in both if secret is not None)

    @property
    def scan_interval_s(self) -> float:
        """The time between two scans of a shard: no group needs them more often than its shortest interval."""
        return min(1.0, max(_SHORTEST_SCAN_S, self.min_check_interval_s))

    @property
    def max_body_bytes(self) -> int:
        """The largest body: it holds the largest prepare, as base64 too."""
        return 2 * self.max_prepare_bytes

    def kafka_config(self, instance_url: str) -> KafkaConfig:
        properties = {name: value.get_secret_value() for name, value in self.kafka.items()}
        try:
            return KafkaConfig(
                **self._of(KafkaSettings),
                properties=properties,
                prefix=self.kafka_prefix,
                prepare_timeout_s=min(MAX_PREPARE_TIMEOUT_S, self.request_timeout_s / 3),
                instance_url=instance_url,
                has_keys=bool(self.master_secrets),
            )
        except ConfigurationError as error:
            raise ConfigurationError(with_variables(error.detail, VARIABLES), **error.fields) from None

    def service_limits(self) -> ServiceLimits:
        return ServiceLimits(**self._of(ServiceSettings), default_policy=self.policy, default_limits=self.limits)

    def api_limits(self) -> ApiLimits:
        return ApiLimits(**self._of(ApiSettings), max_body_bytes=self.max_body_bytes)

    def _of(self, part: type[KafkaSettings | ServiceSettings | ApiSettings]) -> dict[str, Any]:
        """Return the settings of a part. They are handed over without the others, which include secrets."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(part)}


def _bytes(secret: SecretStr | None) -> bytes | None:
    return None if secret is None else secret.get_secret_value().encode("utf-8", "surrogateescape")


_SECRETS: Final = frozenset(
    name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
)
"""Settings whose values are never shown in errors."""
_IN_FILES: Final = sorted(_SECRETS - {"kafka"})
"""Settings that may be in a file."""

VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    **{PREFIX + name.upper(): (name,) for name in Settings.model_fields if name not in ("kafka", *SECTIONS)},
    **{PREFIX + (name + SUFFIX).upper(): (name + SUFFIX,) for name in _IN_FILES},
    **{
        f"{PREFIX}{section}__{name}".upper(): (section, name)
        for section, struct in SECTIONS.items()
        for name in struct.__struct_fields__
    },
}
"""The variable of each setting, and its path in the file. Kafka properties are not listed."""


def load(
    environment: Mapping[str, str] | None = None, *, file: Path | None = None, over: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings: the environment overrides a TOML file, and `over` overrides both.

    Raises ConfigurationError: it names each wrong or unknown setting, with its value and a remedy.
    """
    environment = os.environ if environment is None else environment
    if file is None and (path := environment.get("HALFWAY_CONFIG_FILE")):
        file = Path(path)
    in_file: dict[str, Any] = _read_file(file) if file is not None else {}
    others = _merged(_read_environment(environment), dict(over or {}))
    sources = Sources(file, in_file, others)
    values, faults = read_secrets(_merged(in_file, others), _IN_FILES)
    problems = [explain_text(fault, sources, VARIABLES) for fault in faults]
    plain = {name: name.removeprefix(PREFIX).lower() for name in values}
    removed = {PREFIX + key.upper(): REMOVED[key] for key in plain.values() if key in REMOVED}
    problems += rename(values, plain)
    values = {name: value for name, value in values.items() if plain.get(name) not in REMOVED}
    try:
        settings = Settings(**values)
        settings._removed = removed  # type: ignore[misc]  # noqa: SLF001 - a frozen model may set what is no field
        if not problems:
            return settings
    except ValidationError as error:
        # Whether settings fit together is not known before each of them is right.
        if not problems or any(problem["loc"] for problem in error.errors()):
            problems.append(explain(error, sources, VARIABLES, _SECRETS, suggest))
    raise ConfigurationError("; ".join(problems))


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the settings file {str(file)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the settings file {str(file)!r} is not TOML: {error}") from None
    if isinstance(values.get("kafka"), dict):
        values["kafka"] = {_property(name): _text(value) for name, value in _flat(values["kafka"])}
    return values


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the properties of a table and of the tables in it: TOML reads a name with dots as nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the environment. A variable that is none keeps its name, which is then refused."""
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or variable.startswith(_OTHER_PREFIXES):
            continue
        if _is_of_kubernetes(variable, value):
            continue
        property_name = variable.removeprefix(KAFKA_PREFIX)
        if property_name != variable and all(property_name.split("_")):
            values.setdefault("kafka", {})[_property(property_name)] = value
            continue
        *sections, name = VARIABLES.get(variable.upper(), (variable,))
        (values.setdefault(sections[0], {}) if sections else values)[name] = value
    return values


def _is_of_kubernetes(variable: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable: it does so in each pod, for each Service of the namespace.

    For a Service `halfway`, or `halfway-health`, the names begin as ours do, and HALFWAY_PORT is one of them.
    """
    if _OF_A_SERVICE.fullmatch(variable) is not None:
        return True
    return _ADDRESS_NAME.fullmatch(variable) is not None and _ADDRESS.match(value) is not None


def suggest(variable: str) -> str | None:
    """Return the setting that was probably meant by an unknown variable."""
    known = [
        *VARIABLES,
        *SECTION_VARIABLES,
        *(KAFKA_PREFIX + variable_suffix(name) for name in _KAFKA_NAMES),
        *NOT_SETTINGS,
    ]
    return next(iter(difflib.get_close_matches(variable.upper(), known, n=1, cutoff=_SIMILARITY)), None)


def _property(name: str) -> str:
    return name.lower().replace("_", ".")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name in ("kafka", *SECTIONS):
        if isinstance(below.get(name), dict) and isinstance(above.get(name), dict):
            merged[name] = {**below[name], **above[name]}
    return merged
