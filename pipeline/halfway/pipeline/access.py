"""How to reach Kafka: the coordinator's own settings, translated for Kafka's Java client.

`HALFWAY_KAFKA__<PROPERTY>` (or `[kafka]` of the TOML file) has properties of librdkafka, with which every job asks for
topics and offsets, and DuckDB reads. Spark's connector needs those of the Java client.
`HALFWAY_PIPELINE_KAFKA__<PROPERTY>` sets a property of the Java client directly, and overrides the others.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from halfway.pipeline.errors import PipelineError

_RDKAFKA: Final = "HALFWAY_KAFKA__"
_JAVA: Final = "HALFWAY_PIPELINE_KAFKA__"
_PREFIX: Final = "HALFWAY_KAFKA_PREFIX"
_PREFIX_FORM: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE: Final = "HALFWAY_CONFIG_FILE"
_HORIZON: Final = "HALFWAY_OUTCOME_HORIZON_S"
_FIRST_CHECK: Final = "HALFWAY_POLICY__FIRST_CHECK_AFTER_S"
_MAX_AGE: Final = "HALFWAY_POLICY__MAX_AGE_S"
_COORDINATOR: Final = (_PREFIX, _FILE, _HORIZON, _FIRST_CHECK, "HALFWAY_KAFKA__BOOTSTRAP_SERVERS")
"""The settings of the coordinator that the jobs read, with the one property that every job needs."""
OPTIONS: Final = frozenset(f"HALFWAY_PIPELINE_{name}" for name in ("ENGINE", "JARS", "MASTER", "MEMORY", "WEBHOOK"))
"""The variables of options of `halfway-pipeline`."""
_KEYS: Final = ("kafka", "kafka_prefix", "outcome_horizon_s", "policy")
"""What the jobs read of the TOML file."""
_SIMILAR: Final = 0.9
"""A name this close to one that the jobs read (1 is equal) is taken for that one, misspelt."""
LONGEST_S: Final = 31_536_000
"""The longest time in the settings of the coordinator: a year."""
DEFAULT_PREFIX: Final = "_halfway."

_MAX_IDLE: Final = "connections.max.idle.ms"
_MAX_IDLE_MS: Final = "120000"
"""A firewall or balancer drops what is sent on an idle connection without a word: it is closed before that."""
_SECURITY: Final = "org.apache.kafka.common.security."
_LOGINS: Final = {
    "PLAIN": _SECURITY + "plain.PlainLoginModule",
    "SCRAM-SHA-256": _SECURITY + "scram.ScramLoginModule",
    "SCRAM-SHA-512": _SECURITY + "scram.ScramLoginModule",
    "OAUTHBEARER": _SECURITY + "oauthbearer.OAuthBearerLoginModule",
    "GSSAPI": "com.sun.security.auth.module.Krb5LoginModule",
}
_OAUTH_HANDLER: Final = _SECURITY + "oauthbearer.secured.OAuthBearerLoginCallbackHandler"


@dataclass(frozen=True, kw_only=True)
class KafkaAccess:
    """How to reach Kafka, and the prefix of halfway's topics. The properties have secrets."""

    librdkafka: Mapping[str, str] = field(repr=False)
    prefix: str = DEFAULT_PREFIX
    given: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties of the Java client that override those that are translated."""

    @property
    def bootstrap_servers(self) -> str:
        return self.librdkafka.get("bootstrap.servers") or self.librdkafka.get("metadata.broker.list", "")

    @property
    def java(self) -> dict[str, str]:
        """The properties of the Java client; PipelineError if one of librdkafka cannot be translated."""
        idle = {_MAX_IDLE: self.librdkafka.get(_MAX_IDLE, _MAX_IDLE_MS)}
        return idle | java_properties(self.librdkafka, self.given) | dict(self.given)

    def topic(self, kind: str) -> str:
        return self.prefix + kind


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of the coordinator that the jobs need, in seconds."""

    outcome_horizon_s: float = 900
    first_check_after_s: float = 6
    max_age_s: float = 43_200


def times(environment: Mapping[str, str] | None = None, *, file: Path | None = None) -> Times:
    """Return the coordinator's times, from the environment over a TOML file, as the coordinator does.

    PipelineError if a setting is no time, or its name is misspelt; the message names it.
    """
    environment = os.environ if environment is None else environment
    of_file = _of_file(environment, file)
    policy = of_file.get("policy", {})
    of_policy = policy if isinstance(policy, Mapping) else {}
    found = {}
    for name, variable, given in (
        ("outcome_horizon_s", _HORIZON, of_file),
        ("first_check_after_s", _FIRST_CHECK, of_policy),
        ("max_age_s", _MAX_AGE, of_policy),
    ):
        value = environment.get(variable, given.get(name))
        if value is not None:
            found[name] = _seconds(variable, value)
    return Times(**found)


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        raise PipelineError(
            f"{name} is {str(value)[:80]!r}: it must be a number of seconds above 0, {LONGEST_S} at most"
        )
    return seconds


def load(environment: Mapping[str, str] | None = None, *, file: Path | None = None) -> KafkaAccess:
    """Return how to reach Kafka, from the environment over a TOML file, as the coordinator does.

    PipelineError if a setting is missing or misspelt, or the Java client cannot use it; the message names it.
    """
    environment = os.environ if environment is None else environment
    of_file = _of_file(environment, file)
    properties = {
        _property(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in dict(of_file.get("kafka", {})).items()
    }
    of_environment, given = (
        {_property(name.removeprefix(start)): environment[name] for name in environment if name.startswith(start)}
        for start in (_RDKAFKA, _JAVA)
    )
    properties |= of_environment
    prefix = environment.get(_PREFIX) or str(of_file.get("kafka_prefix", DEFAULT_PREFIX))
    access = KafkaAccess(librdkafka=properties, prefix=prefix, given=given)
    if not access.bootstrap_servers:
        raise PipelineError("HALFWAY_KAFKA__BOOTSTRAP_SERVERS is not set: set it to host:port of a Kafka broker")
    if _PREFIX_FORM.fullmatch(prefix) is None:
        raise PipelineError(f"{_PREFIX} is {prefix[:80]!r}: it must be up to 64 of A-Z a-z 0-9 . _ -")
    access.java  # noqa: B018 - which refuses what cannot be translated
    return access


def _refuse_misspelt(environment: Mapping[str, str], of_file: Mapping[str, Any]) -> None:
    """Raise PipelineError if a setting that a job would ignore is one that it reads, misspelt.

    The environment and the file may be the coordinator's own, so settings that only the coordinator reads are ignored.
    """
    misspelt = {
        variable: _nearest(variable, [*_COORDINATOR, *OPTIONS])
        for variable in environment
        if variable.startswith("HALFWAY_") and not variable.startswith((_RDKAFKA, _JAVA)) and variable not in OPTIONS
    }
    misspelt |= {key: _nearest(key, _KEYS) for key in of_file}
    for name, nearest in sorted(misspelt.items()):
        if nearest == name:
            continue
        if nearest is not None:
            raise PipelineError(f"{name} is no setting: did you mean {nearest}?")
        if name.startswith("HALFWAY_PIPELINE_"):
            raise PipelineError(f"{name} is no setting: remove it, or use one of {', '.join(sorted(OPTIONS))}")


def _nearest(name: str, known: Sequence[str]) -> str | None:
    short = {one.removeprefix("HALFWAY_"): one for one in known}
    similar = difflib.get_close_matches(name.removeprefix("HALFWAY_"), short, n=1, cutoff=_SIMILAR)
    return short[similar[0]] if similar else None


def _of_file(environment: Mapping[str, str], file: Path | None) -> dict[str, Any]:
    """Return the settings of a file, by default of the one that the environment names, if nothing is misspelt."""
    if file is None and environment.get(_FILE):
        file = Path(environment[_FILE])
    try:
        found = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineError(f"the settings file {str(file)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(f"the settings file {str(file)!r} is not TOML: {error}") from None
    _refuse_misspelt(environment, found)
    return found


def _property(name: str) -> str:
    return name.lower().replace("_", ".")


def java_properties(rdkafka: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of librdkafka for connections and authentication as those of the Java client.

    Files are read here and sent as text, so the executors do not need them. Properties that only tune producers and
    consumers are left out, and so are others without a counterpart if `more` has security properties of its own.
    PipelineError if a security property has no counterpart, or a file cannot be read.
    """
    given = dict(rdkafka)
    plain = {
        "bootstrap.servers": given.pop("bootstrap.servers", None) or given.get("metadata.broker.list"),
        "client.id": given.pop("client.id", None),
        "security.protocol": given.pop("security.protocol", "").upper(),
    }
    java = {name: value for name, value in plain.items() if value} | _sasl(given) | _tls(given)
    left = sorted(name for name in given if name.startswith(("ssl.", "sasl.", "enable.ssl.", "enable.sasl.")))
    if left and not any(name.startswith(("ssl.", "sasl.")) for name in more):
        variables = ", ".join(_RDKAFKA + name.upper().replace(".", "_") for name in left)
        raise PipelineError(
            f"{variables}: Kafka's Java client, which Spark uses, has no such property: say the same to it with "
            f"{_JAVA}<PROPERTY>"
        )
    return java


def _sasl(given: dict[str, str]) -> dict[str, str]:
    named, alias = given.pop("sasl.mechanisms", None), given.pop("sasl.mechanism", None)
    mechanism = (named or alias or "").upper()
    user, password = given.pop("sasl.username", None), given.pop("sasl.password", None)
    if not mechanism:
        return {}
    java, login = {"sasl.mechanism": mechanism}, {"username": user, "password": password}
    if mechanism == "OAUTHBEARER":
        of, login = _oauth(given)
        java |= of
    elif mechanism == "GSSAPI":
        java["sasl.kerberos.service.name"] = given.pop("sasl.kerberos.service.name", "kafka")
        login = _kerberos(given)
    if mechanism in _LOGINS:
        java["sasl.jaas.config"] = _jaas(_LOGINS[mechanism], login)
    return java


def _oauth(given: dict[str, str]) -> tuple[dict[str, str], dict[str, str | None]]:
    """Return properties of the Java client, and the options of its login."""
    prefix = "sasl.oauthbearer."
    if given.pop(prefix + "method", "default").lower() != "oidc":
        raise PipelineError(f"{_RDKAFKA}SASL_OAUTHBEARER_METHOD must be oidc: a job cannot call back for a token")
    java = {"sasl.login.callback.handler.class": _OAUTH_HANDLER}
    if url := given.pop(prefix + "token.endpoint.url", None):
        java[prefix + "token.endpoint.url"] = url
    options = {"clientId": "client.id", "clientSecret": "client.secret", "scope": "scope"}
    return java, {name: given.pop(prefix + of, None) for name, of in options.items()}


def _kerberos(given: dict[str, str]) -> dict[str, str | None]:
    prefix = "sasl.kerberos."
    for name in ("kinit.cmd", "min.time.before.relogin"):
        given.pop(prefix + name, None)
    keytab, principal = given.pop(prefix + "keytab", None), given.pop(prefix + "principal", None)
    if keytab is None:
        return {"useKeyTab": "false", "useTicketCache": "true", "principal": principal}
    used = {"useKeyTab": "true", "useTicketCache": "false", "storeKey": "true"}
    return {**used, "keyTab": keytab, "principal": principal}


def _jaas(module: str, options: Mapping[str, str | None]) -> str:
    quoted = (
        f'{name}="{value.replace(chr(92), chr(92) * 2).replace(chr(34), chr(92) + chr(34))}"'
        for name, value in options.items()
        if value is not None
    )
    return f"{module} required {' '.join(quoted)};"


def _tls(given: dict[str, str]) -> dict[str, str]:
    java: dict[str, str] = {}
    if given.pop("enable.ssl.certificate.verification", "true").lower() != "true":
        raise PipelineError(
            f"{_RDKAFKA}ENABLE_SSL_CERTIFICATE_VERIFICATION=false: the Java client always verifies; give it the "
            f"certificate authority with {_RDKAFKA}SSL_CA_LOCATION"
        )
    algorithm = given.pop("ssl.endpoint.identification.algorithm", None)
    if algorithm is not None:
        java["ssl.endpoint.identification.algorithm"] = "" if algorithm.lower() == "none" else algorithm
    authority = given.pop("ssl.ca.pem", None) or _pem(given, "ssl.ca.location")
    if authority:
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
    chain = given.pop("ssl.certificate.pem", None) or _pem(given, "ssl.certificate.location")
    key = given.pop("ssl.key.pem", None) or _pem(given, "ssl.key.location")
    if key and "BEGIN PRIVATE KEY" not in key and "BEGIN ENCRYPTED PRIVATE KEY" not in key:
        raise PipelineError(
            "the private key is not in PKCS #8, the only form that the Java client reads: "
            "openssl pkcs8 -topk8 -in key.pem -out key8.pem"
        )
    if chain and key:
        java |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": chain, "ssl.keystore.key": key}
    elif store := given.pop("ssl.keystore.location", None):
        java |= {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": store}
        if password := given.pop("ssl.keystore.password", None):
            java["ssl.keystore.password"] = password
    if secret := given.pop("ssl.key.password", None):
        java["ssl.key.password"] = secret
    return java


def _pem(given: dict[str, str], name: str) -> str | None:
    path = given.pop(name, None)
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{_RDKAFKA}{name.upper().replace('.', '_')} is {path!r}: no PEM file ({error})") from None
