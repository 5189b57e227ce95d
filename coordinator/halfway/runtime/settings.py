"""Every setting, in one typed model: from the environment (`HALFWAY_…`) over a TOML file."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FilePath,
    IPvAnyNetwork,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from halfway.domain.errors import ConfigurationError
from halfway.domain.policy import CheckPolicy, OnExhausted
from halfway.kafka.clients.config import KafkaConfig
from halfway.kafka.log.owners import refused
from halfway.service.requests import ServiceLimits

PREFIX: Final = "HALFWAY_"
KAFKA_PREFIX: Final = "HALFWAY_KAFKA__"
NOT_SETTINGS: Final = frozenset({"HALFWAY_URL", "HALFWAY_HEALTH_URL", "HALFWAY_TOKEN", "HALFWAY_CONFIG_FILE"})
"""Variables of the command line: where the coordinator and its health are, what it is shown, and where the file is."""
_OF_OTHERS: Final = ("HALFWAY_PIPELINE_", "HALFWAY_TEST_")
"""How variables begin that are for the Spark jobs and for the tests: one environment may serve all."""
_USUAL_PROPERTIES: Final = (
    "BOOTSTRAP_SERVERS",
    "SECURITY_PROTOCOL",
    "SASL_MECHANISM",
    "SASL_USERNAME",
    "SASL_PASSWORD",
    "SSL_CA_LOCATION",
    "SSL_CERTIFICATE_LOCATION",
    "SSL_KEY_LOCATION",
    "SSL_KEY_PASSWORD",
    "CLIENT_ID",
)
"""Properties of librdkafka that a misspelt variable may have meant; any other passes through as well."""
_ALIKE: Final = 0.85
_SHOWN: Final = 80
_MIN_CREDENTIAL: Final = 16
_MAX_CREDENTIAL: Final = 512

Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Port = Annotated[int, Field(ge=0, le=65_535)]


def _split(value: object) -> object:
    """Take a list from one variable, between commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Hosts = Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.*_:\[\]-]+$")], ...], BeforeValidator(_split)]
Networks = Annotated[tuple[IPvAnyNetwork, ...], BeforeValidator(_split)]
KIB: Final = 1024
MIB: Final = 1024 * 1024


class PolicyDefaults(BaseModel):
    """The policy of groups that set no other; seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_check_after_s: Seconds = 6
    check_interval_s: Seconds = 30
    max_interval_s: Seconds = 300
    max_checks: Annotated[int, Field(ge=1, le=10_000)] = 15
    max_age_s: Seconds = 43_200
    on_exhausted: OnExhausted = OnExhausted.PARK


class Settings(BaseSettings):
    """What an operator can set; a field `x_y` is the variable `HALFWAY_X_Y` and the key `x_y` of the file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    kafka: dict[str, SecretStr] = Field(default_factory=dict)
    """librdkafka properties; `HALFWAY_KAFKA__BOOTSTRAP_SERVERS` is `bootstrap.servers`."""
    kafka_prefix: str = "_halfway."
    shards: Annotated[int, Field(ge=1, le=10_000)] = 8
    replication_factor: Annotated[int, Field(ge=1, le=32_767)] | None = None
    outcome_horizon_s: Seconds = 900
    session_timeout_s: Seconds = 10
    transaction_timeout_s: Seconds = 45
    prepare_timeout_s: Annotated[float, Field(gt=0, le=5)] = 5
    lane_max_ends: Count = 1_000
    lane_max_bytes: Count = 16 * MIB
    lane_queue: Count = 10_000
    lane_queue_bytes: Count = 256 * MIB
    lane_stall_s: Seconds = 30
    segment_ms: Count = 3_600_000
    min_compaction_lag_ms: Annotated[int, Field(ge=0)] | None = None
    max_compaction_lag_ms: Count | None = None
    op_retention_ms: Annotated[int, Field(ge=1)] = 7 * 24 * 3_600_000

    host: str = "0.0.0.0"  # noqa: S104 - a sidecar in a container is reached from outside it
    port: Port = 8080
    health_host: str = "0.0.0.0"  # noqa: S104
    health_port: Port = 8081
    instance_url: str | None = None
    """Where other instances reach this one; http://<host name>:<port> if it is not set."""
    peer_credential: SecretStr | None = None
    """What instances show each other, the same on all of them; without it nothing is forwarded."""
    peer_credential_previous: SecretStr | None = None
    """Accepted as well, so that the credential can be changed while instances run."""
    request_timeout_s: Seconds = 15
    max_body_bytes: Count = 8 * MIB
    max_requests: Count = 4_096
    """Requests in flight; more are answered 429."""
    prepare_wait_s: Seconds = 1
    """How long a prepare may wait for a place under overload; then it is answered 429."""
    max_batch_items: Count = 1_000
    shutdown_timeout_s: Seconds = 25

    max_messages: Count = 1_000
    max_prepare_bytes: Count = 4 * MIB
    max_pending: Count = 2_000_000
    max_groups: Count = 1_000
    max_outcomes_per_shard: Count = 1_000_000
    payload_cache_bytes: Count = 256 * MIB
    reanchor_after: Count = 50_000
    reject_prepares: bool = False

    policy: PolicyDefaults = PolicyDefaults()
    scan_interval_s: Seconds = 1
    min_check_interval_s: Seconds = 1
    """The floor of every group's `check_interval_s`: a group that chooses less gets this."""
    check_host_rate: Count = 1_000
    """Checks a second to one host, from all groups; each group gets one a second through whatever the others send."""
    check_timeout_s: Seconds = 10
    check_connect_timeout_s: Seconds = 3
    check_demand_nonce: bool = False
    """Whether only an answer that echoes the question's nonce is a verdict."""
    check_hosts: Hosts = ()
    """Host names that may be checked, `*` for any characters; empty: all."""
    check_networks: Networks = ()
    """Networks in which they must lie; empty: all but link-local, metadata, multicast and unspecified addresses."""
    check_ca_file: FilePath | None = None
    """Certificate authorities (PEM) of https endpoints in place of the system's."""
    check_concurrency: Count = 16
    check_bytes: Count = 64 * 1024 * 1024
    check_queue: Count = 1_000
    lease_s: Seconds = 30

    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read what `load` has already merged, and nothing behind its back."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.max_body_bytes < self.max_prepare_bytes:
            raise ValueError(
                f"max_body_bytes {self.max_body_bytes} is below max_prepare_bytes {self.max_prepare_bytes}: "
                "no prepare of that size could arrive"
            )
        if self.instance_url is not None and (refusal := refused(self.instance_url)) is not None:
            raise ValueError(f"instance_url {self.instance_url[:_SHOWN]!r}: {refusal}")
        for credential in self.peer_credentials:
            if not _MIN_CREDENTIAL <= len(credential) <= _MAX_CREDENTIAL or not credential.isascii():
                raise ValueError(
                    f"peer_credential is to be {_MIN_CREDENTIAL} to {_MAX_CREDENTIAL} ASCII characters: make it with "
                    "openssl rand -hex 32"
                )
        policy = self.policy
        if policy.max_interval_s < policy.check_interval_s:
            raise ValueError(
                f"policy.max_interval_s {policy.max_interval_s:g} is below policy.check_interval_s "
                f"{policy.check_interval_s:g}: raise the one or lower the other"
            )
        if policy.first_check_after_s >= policy.max_age_s:
            raise ValueError(
                f"policy.first_check_after_s {policy.first_check_after_s:g} is not below policy.max_age_s "
                f"{policy.max_age_s:g}: no check would ever be sent"
            )
        if self.policy.max_age_s > self.max_age_limit_s:
            raise ValueError(
                f"policy.max_age_s {self.policy.max_age_s:g} could outlive op_retention_ms {self.op_retention_ms}: "
                f"at most {self.max_age_limit_s:g}"
            )
        return self

    @property
    def max_age_limit_s(self) -> float:
        """The largest `max_age_s` of a policy: a day less than op markers are kept, or six sevenths of a short time."""
        return self.op_retention_ms / 1000 * 6 / 7

    @property
    def peer_credentials(self) -> tuple[str, ...]:
        """What other instances may show: the credential, and the one before it."""
        given = (self.peer_credential, self.peer_credential_previous)
        return tuple(value.get_secret_value() for value in given if value is not None)

    def kafka_config(self, instance_url: str) -> KafkaConfig:
        """Return the Kafka adapter's part."""
        return KafkaConfig(
            properties={name: value.get_secret_value() for name, value in self.kafka.items()},
            instance_url=instance_url,
            prefix=self.kafka_prefix,
            **{
                name: getattr(self, name)
                for name in (
                    "max_prepare_bytes",
                    "max_messages",
                    "shards",
                    "replication_factor",
                    "outcome_horizon_s",
                    "session_timeout_s",
                    "transaction_timeout_s",
                    "prepare_timeout_s",
                    "lane_max_ends",
                    "lane_max_bytes",
                    "lane_queue",
                    "lane_queue_bytes",
                    "lane_stall_s",
                    "segment_ms",
                    "min_compaction_lag_ms",
                    "max_compaction_lag_ms",
                    "op_retention_ms",
                )
            },
        )

    def limits(self) -> ServiceLimits:
        """Return the service's part."""
        return ServiceLimits(
            default_policy=CheckPolicy(**self.policy.model_dump()),
            max_age_limit_s=self.max_age_limit_s,
            **{
                name: getattr(self, name)
                for name in (
                    "shards",
                    "outcome_horizon_s",
                    "max_outcomes_per_shard",
                    "payload_cache_bytes",
                    "max_messages",
                    "max_prepare_bytes",
                    "max_pending",
                    "max_groups",
                    "reanchor_after",
                    "min_check_interval_s",
                    "check_host_rate",
                    "check_concurrency",
                    "check_bytes",
                    "check_queue",
                    "lease_s",
                    "reject_prepares",
                )
            },
        )


def load(
    environment: Mapping[str, str] | None = None, *, file: Path | None = None, over: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of the environment over those of a TOML file, and `over` above both.

    Raises:
        ConfigurationError: naming each setting that is wrong or unknown, its value and the remedy.

    """
    environment = os.environ if environment is None else environment
    if file is None and (named := environment.get("HALFWAY_CONFIG_FILE")):
        file = Path(named)
    values: dict[str, Any] = _of_file(file) if file is not None else {}
    values = _merged(values, _of_environment(environment))
    values = _merged(values, dict(over or {}))
    try:
        return Settings(**values)
    except ValidationError as error:
        raise ConfigurationError(_told(error, values)) from None


def _of_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"the settings file {str(file)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"the settings file {str(file)!r} is not TOML: {error}") from None
    if isinstance(values.get("kafka"), dict):
        values["kafka"] = {_property(name): _text(value) for name, value in values["kafka"].items()}
    return values


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    unknown = []
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or variable.startswith(_OF_OTHERS):
            continue
        name = variable.removeprefix(PREFIX).lower()
        outer, _, inner = name.partition("__")
        if variable.startswith(KAFKA_PREFIX) and inner:
            values.setdefault("kafka", {})[_property(inner)] = value
        elif inner and outer == "policy" and inner in PolicyDefaults.model_fields:
            values.setdefault("policy", {})[inner] = value
        elif not inner and name in Settings.model_fields and name not in ("kafka", "policy"):
            values[name] = value
        else:
            unknown.append(variable)
    if unknown:
        named = ", ".join(map(_with_the_nearest, sorted(unknown)))
        raise ConfigurationError(
            f"{named}: not a setting of halfway; remove it or mend its name (docs/operating.md lists them all)"
        )
    return values


def _with_the_nearest(variable: str) -> str:
    """Return the variable and the setting that was probably meant."""
    known = [PREFIX + name.upper() for name in Settings.model_fields if name not in ("kafka", "policy")]
    known += [f"{PREFIX}POLICY__{name.upper()}" for name in PolicyDefaults.model_fields]
    known += [KAFKA_PREFIX + name for name in _USUAL_PROPERTIES]
    nearest = difflib.get_close_matches(variable.upper(), [*known, *NOT_SETTINGS], n=1, cutoff=_ALIKE)
    return f"{variable} (did you mean {nearest[0]}?)" if nearest else variable


def _property(name: str) -> str:
    return name.lower().replace("_", ".")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name in ("kafka", "policy"):
        if isinstance(below.get(name), dict) and isinstance(above.get(name), dict):
            merged[name] = {**below[name], **above[name]}
    return merged


def _told(error: ValidationError, values: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        # The place within a list is not part of a variable's name.
        place = [part for part in problem["loc"] if isinstance(part, str)]
        if not place:
            lines.append(problem["msg"].removeprefix("Value error, "))
            continue
        variable = PREFIX + "__".join(place).upper()
        if place[0] == "kafka":
            lines.append(f"{variable}: {problem['msg']}")
            continue
        given: Any = values
        for part in place:
            given = given.get(part) if isinstance(given, Mapping) else None
        unknown = problem["type"] == "extra_forbidden"
        remedy = "not a setting of halfway: remove it or mend its name" if unknown else problem["msg"]
        named = _with_the_nearest(variable) if unknown else variable
        lines.append(f"{named} is {str(given)[:_SHOWN]!r}: {remedy}")
    return "; ".join(lines)
