"""`halfway apply` and `halfway export`: the groups and keys of a deployment in one TOML file.

The file has the names and shapes of the API: a table `groups.NAME` is the body of a PUT of that group, an item of
`keys` the body of the call that makes a key. It never holds a key.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from yarl import URL

from halfway.app.cli.remote import NoAnswer, Remote, path_of
from halfway.app.terminal import complain, fail, printable, say
from halfway.coordinator.access import MAX_KEYS, MAX_LIVE_KEYS
from halfway.coordinator.requests import ServiceLimits
from halfway.http.requests.models import GroupRequest, KeyRequest, NewGroupName
from halfway.http.requests.validation import Validation
from halfway.protocol.errors import HalfwayError, InvalidRequestError
from halfway.protocol.keys import kind_in, public_id
from halfway.protocol.records import CheckMode

if TYPE_CHECKING:
    from halfway.coordinator.requests import GroupSpec

PENDING_CHANGES: Final = 3
"""The exit status of a dry run that finds something to do; 2 is a wrong command line."""
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_NO_PREFIX: Final = "\n"
"""Begins no topic: only the coordinator knows the prefix of its own."""
_HIDDEN: Final = "/…"
"""How a group's URL ends for a caller that may see its host only."""
_PLAIN: Final = "policy", "limits"

Key = tuple[str, str, str | None]
"""The kind and the name of a key's principal, and the certificate that is bound to it, if it is one."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A group as it is, or as it is to be."""

    mode: str
    urls: tuple[str, ...]
    topics: tuple[str, ...]
    policy: dict[str, Any]
    limits: dict[str, Any]
    reject_prepares: bool

    def body(self) -> dict[str, Any]:
        """Return it as the API takes it, and as the file has it."""
        check: dict[str, Any] = {"mode": self.mode} if self.mode == CheckMode.PULL else {"urls": list(self.urls)}
        own = {part: values for part in _PLAIN if (values := getattr(self, part))}
        switch = {"reject_prepares": True} if self.reject_prepares else {}
        return {"check": check, "topics": list(self.topics), **own, **switch}


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The groups by name, and the keys that are valid with their public ids."""

    groups: dict[str, State]
    keys: dict[Key, list[str]]
    access_control: bool = True
    expired_keys: int = 0
    """They count among those that a deployment may have."""


# --- what there is


def read_deployment(remote: Remote) -> Deployment:
    """Return what a coordinator has; the command ends if the caller may not see all of it."""
    asked = remote.ask("GET", path_of("keys"), query={"limit": "1"}, expected=HTTPStatus.CONFLICT)
    keys: dict[Key, list[str]] = {}
    expired_keys = 0
    access_control = asked.get("error_code") != "access_control_off"
    if access_control:
        for row in remote.every(path_of("keys"), "keys"):
            if row["expires_at"] is None or datetime.fromisoformat(row["expires_at"]) > datetime.now(UTC):
                keys.setdefault((row["kind"], row["name"], row["certificate"]), []).append(row["id"])
            else:
                expired_keys += 1
    groups = {row["group"]: _state_of(row) for row in remote.every(path_of("groups"), "groups")}
    return Deployment(groups=groups, keys=keys, access_control=access_control, expired_keys=expired_keys)


def _state_of(row: Mapping[str, Any]) -> State:
    if "policy_overrides" not in row:
        fail("an instance of an earlier release answered: upgrade all instances, then try again")
    if any(url.endswith(_HIDDEN) for url in row["check"]["urls"]):
        fail(f"the URLs of group {row['group']!r} are hidden from this key: use an operator's key")
    return State(
        mode=row["check"]["mode"],
        urls=tuple(row["check"]["urls"]),
        topics=tuple(row["topics"]),
        policy=row["policy_overrides"],
        limits=row["limits"],
        reject_prepares=row["reject_prepares"],
    )


# --- the file


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What a file declares: groups by name, and keys, None if it has no list of keys."""

    groups: dict[str, GroupSpec]
    keys: dict[Key, KeyRequest] | None


def read_file(path: str) -> Declared:
    """Return what a TOML file (`-`: standard input) declares. If it is wrong, the command ends and names what is."""
    try:
        with click.open_file(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        fail(f"cannot read {path!r}: {error.strerror}")
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        fail(f"the file is not TOML: {error}")
    if unknown := content.keys() - {"groups", "keys"}:
        fail(f"unknown: {', '.join(sorted(unknown))}: the file has tables [groups.NAME] and [[keys]] only")
    validation = Validation(internal_prefix=_NO_PREFIX)
    tables, rows = content.get("groups", {}), content.get("keys")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        fail("groups must be tables, such as [groups.shop]")
    if rows is not None and not isinstance(rows, list):
        fail("keys must be a list of tables: [[keys]]")
    groups: dict[str, GroupSpec] = {}
    for name, table in tables.items():
        try:
            msgspec.convert(name, NewGroupName)
        except msgspec.ValidationError:
            fail(f"groups.{name!r}: a name has 1 to 100 letters, digits and . _ -, and is not . or ..")
        groups[name] = _valid(
            validation, f"groups.{name}", GroupRequest, table, partial(validation.to_group, name=name)
        )
    keys: dict[Key, KeyRequest] = {}
    for number, row in enumerate(rows or ()):
        request = _valid(validation, f"keys[{number}]", KeyRequest, row, lambda request: request)
        key = request.kind, request.name, request.certificate
        if key in keys:
            fail(f"keys[{number}]: the {_key_text(key)} is named twice")
        keys[key] = request
    return Declared(groups=groups, keys=None if rows is None else keys)


def _valid(validation: Validation, where: str, model: Any, table: object, convert: Callable[[Any], Any]) -> Any:
    """Return what a table declares, after the rules of the API."""
    _refuse_other_than_json(table, where)
    if isinstance(table, dict) and "validate_only" in table:
        fail(f"{where}.validate_only: not a field of the file: --dry-run changes nothing")
    try:
        return validation.read(model, json.dumps(table).encode(), convert)
    except InvalidRequestError as error:
        errors = error.fields.get("errors") or [{"field": "", "detail": error.detail}]
        fail("\n".join(f"{where}.{one['field']}: {one['detail']}" for one in errors))  # type: ignore[attr-defined]
    except HalfwayError as error:
        fail(f"{where}: {error.detail}")


def _refuse_other_than_json(value: object, where: str) -> None:
    """End the command at the first value of TOML that JSON does not have."""
    if isinstance(value, dict):
        for name, one in value.items():
            _refuse_other_than_json(one, f"{where}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            _refuse_other_than_json(one, f"{where}[{number}]")
    elif isinstance(value, date | time):
        fail(f"{where}: {value} is a date or time in TOML: if it is a name, put it in quotes")
    elif isinstance(value, float) and not math.isfinite(value):
        fail(f"{where}: inf and nan are not numbers here")


def to_toml(deployment: Deployment) -> str:
    """Return the file that declares what a deployment has."""
    lines = ["# The groups and keys of a deployment, for `halfway apply`. It holds no key, but maybe secrets in URLs."]
    for name, state in sorted(deployment.groups.items()):
        lines += ["", f"[groups.{_toml_name(name)}]", *_assignments(state.body())]
    for kind, name, certificate in sorted(deployment.keys, key=lambda key: (key[0], key[1], key[2] or "")):
        row = {"kind": kind, "name": name} | ({} if certificate is None else {"certificate": certificate})
        lines += ["", "[[keys]]", *_assignments(row)]
    return "\n".join(lines)


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_name(name)} = {_toml(value)}" for name, value in table.items()]


def _toml_name(name: str) -> str:
    return name if _BARE.fullmatch(name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(_assignments(value)) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if not isinstance(value, str):
        return repr(value)
    return '"' + "".join(one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08x}" for one in value) + '"'


# --- the plan


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call, with the text that shows it. It returns whether it was done, and ends the command if it fails."""

    text: str
    act: Callable[[], bool]
    try_out: Callable[[], object] = bool
    """Has the coordinator refuse the call if it would; nothing for a call that cannot be tried out."""
    makes_key: bool = False

    @property
    def headline(self) -> str:
        return self.text.partition("\n")[0]

    def is_accepted(self) -> bool:
        """Try it out, and say what is refused."""
        try:
            self.try_out()
        except NoAnswer:
            complain("so nothing is changed")
            raise
        except SystemExit:
            complain(f"refused, so nothing is changed: {self.headline}")
            return False
        return True


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps in their order, and what the file does not name and is kept."""

    steps: list[Step]
    kept: list[str]


class Changes:
    """Compares what a file declares with what there is."""

    def __init__(
        self, remote: Remote, now: Deployment, declared: Declared, *, prune: bool, write: Callable[..., None]
    ) -> None:
        self._remote = remote
        self._now = now
        self._declared = declared
        self._prune = prune
        self._write = write
        self._kept: list[str] = []
        self._in_use: set[str] = set()
        """Groups that could not be deleted: their keys are kept, so that their services can end what is left."""

    def plan(self, own_key: str | None) -> Plan:
        """Return the steps: first what is added and changed, then what is removed."""
        if excess := list(self._excess()):
            fail("\n".join(excess))
        steps = [step for name, spec in self._declared.groups.items() if (step := self._group(name, spec)) is not None]
        steps += [
            self._new_key(key, one) for key, one in (self._declared.keys or {}).items() if key not in self._now.keys
        ]
        groups = [name for name in self._now.groups if name not in self._declared.groups]
        keys = [
            (key, key_id)
            for key, ids in self._now.keys.items()
            if self._declared.keys is not None and key not in self._declared.keys
            for key_id in ids
        ]
        if self._prune:
            if groups and not self._declared.groups:  # mostly what made the file has failed
                remedy = "name one that stays, or remove each with `halfway groups delete`"
                fail(f"the file names no group, and --prune would remove all that there are ({len(groups)}): {remedy}")
            if mine := [key for key, key_id in keys if key_id == own_key]:
                fail(f"{_key_text(mine[0])}: --prune would revoke the key of this command: name it in the file")
            steps += [Step(text=f"- group {name}", act=partial(self._delete_group, name)) for name in groups]
            steps += [
                Step(text=f"- {_key_text(key)} ({key_id})", act=partial(self._revoke, key, key_id))
                for key, key_id in keys
            ]
        else:
            self._kept += [f"group {name}" for name in groups]
            self._kept += [f"{_key_text(key)} ({key_id})" for key, key_id in keys]
        return Plan(steps=steps, kept=self._kept)

    def _excess(self) -> Iterable[str]:
        """Return what the coordinator would refuse in the midst of the steps, because of others before it."""
        remedy = "name fewer, or remove some first: what is removed is removed last"
        groups = len(self._now.groups.keys() | self._declared.groups.keys())
        if groups > ServiceLimits.max_groups:
            yield f"groups: there would be {groups}, at most {ServiceLimits.max_groups}: {remedy}"
        new = (self._declared.keys or {}).keys() - self._now.keys
        keys = sum(map(len, self._now.keys.values())) + self._now.expired_keys + len(new)
        if new and keys > MAX_KEYS:
            yield f"keys: there would be {keys}, at most {MAX_KEYS}: {remedy}"
        bound = [key for key in self._now.keys.keys() | new if key[2] is not None]
        uses, holders = Counter(key[2] for key in bound), Counter(key[:2] for key in bound)
        for kind, name, certificate in sorted(new.intersection(bound)):
            if uses[certificate] > 1:
                yield f"keys: certificate {certificate!r} would be bound {uses[certificate]} times, at most 1: {remedy}"
            if holders[kind, name] > MAX_LIVE_KEYS:
                held = holders[kind, name]
                yield f"keys: {kind} {name!r} would have {held} certificates, at most {MAX_LIVE_KEYS}: {remedy}"

    def _group(self, name: str, spec: GroupSpec) -> Step | None:
        """Return the step that makes a group what the file says, None if it is that already."""
        before = self._now.groups.get(name)
        after = self._wanted(name, spec, before)
        lines = list(_difference(before, after))
        if before is not None and not lines:
            return None
        # What the file does not name is not sent: an operator may have changed it since it was read.
        body = after.body() | {"limits": after.limits, "reject_prepares": after.reject_prepares}
        if before is not None and after.limits == before.limits:
            del body["limits"]
        if spec.reject_prepares is None:
            del body["reject_prepares"]

        def act(**over: bool) -> bool:
            self._remote.ask("PUT" if self._prune else "PATCH", path_of("groups", name), body=body | over)
            return True

        text = "\n".join([f"{'+' if before is None else '~'} group {name}", *lines])
        return Step(text=text, act=act, try_out=partial(act, validate_only=True))

    def _wanted(self, name: str, spec: GroupSpec, before: State | None) -> State:
        """Return the group after the change: without --prune it keeps what the file does not name."""
        policy, limits = (msgspec.to_builtins(part) if part is not None else {} for part in (spec.policy, spec.limits))
        rejects = bool(before and before.reject_prepares) if spec.reject_prepares is None else spec.reject_prepares
        topics = spec.topics
        if before is not None:
            own = {"policy": policy, "limits": limits}
            left = [f"topic {topic}" for topic in before.topics if topic not in topics]
            left += [f"{part}.{one}" for part in _PLAIN for one in getattr(before, part) if one not in own[part]]
            if left and not self._prune:
                self._kept.append(f"{', '.join(left)} of group {name}")
                topics = tuple(dict.fromkeys((*before.topics, *topics)))
                policy, limits = before.policy | policy, before.limits | limits
        return State(
            mode=spec.mode.value, urls=spec.urls, topics=topics, policy=policy, limits=limits, reject_prepares=rejects
        )

    def _new_key(self, key: Key, request: KeyRequest) -> Step:
        def act() -> bool:
            try:
                self._write(self._remote, key, msgspec.to_builtins(request))
            except SystemExit:
                complain(f"if `halfway keys list --name {key[1]}` shows this key, nobody has it: revoke it first")
                raise
            return True

        has_group = key[0] != "group" or key[1] in self._declared.groups or key[1] in self._now.groups
        text = f"+ {_key_text(key)}{'' if has_group else ', though there is no such group'}"
        return Step(text=text, act=act, makes_key=request.certificate is None)

    def _delete_group(self, name: str) -> bool:
        answer = self._remote.ask("DELETE", path_of("groups", name), expected=HTTPStatus.CONFLICT)
        if "error_code" not in answer:
            return True
        self._in_use.add(name)
        complain(f"{answer.get('detail')}. Run this again after that")
        return False

    def _revoke(self, key: Key, key_id: str) -> bool:
        if key[0] == "group" and key[1] in self._in_use:
            complain(f"{_key_text(key)} ({key_id}) is kept, as the group is")
            return False
        self._remote.ask("DELETE", path_of("keys", key_id))
        return True


def _difference(before: State | None, after: State) -> Iterable[str]:
    """Return a line for each part that differs."""
    old = None if before is None else (before.mode, before.urls)
    if old != (after.mode, after.urls):
        yield f"    check: {_check_text(before)} -> {_check_text(after)}"
    had = () if before is None else before.topics
    for sign, topics in (("+", set(after.topics) - set(had)), ("-", set(had) - set(after.topics))):
        yield from (f"    {sign} topic {topic}" for topic in sorted(topics))
    for part in _PLAIN:
        values, now = {} if before is None else getattr(before, part), getattr(after, part)
        for name in sorted(values.keys() | now.keys()):
            if values.get(name) != now.get(name):
                yield f"    {part}.{name}: {values.get(name, 'default')} -> {now.get(name, 'default')}"
    if after.reject_prepares != bool(before and before.reject_prepares):
        yield f"    new transactions: {'refused' if after.reject_prepares else 'accepted'}"


def _check_text(state: State | None) -> str:
    """Return the way of a group's checks without what may be a secret: users and queries of URLs."""
    if state is None:
        return "none"
    urls = (
        f"{url.with_user(None).with_query(None)}{'?…' * bool(url.raw_query_string)}" for url in map(URL, state.urls)
    )
    return "pull" if state.mode == CheckMode.PULL else ", ".join(urls)


def _key_text(key: Key) -> str:
    kind, name, certificate = key
    return f"key of {kind} {name}" if certificate is None else f"certificate {certificate} of {kind} {name}"


# --- the commands


def apply(
    path: str, remote: Remote, *, token: str | None, dry_run: bool, prune: bool, keys_dir: Path | None, show_keys: bool
) -> int:
    """Show what is to be done and do it; return the exit status."""
    declared, now = read_file(path), read_deployment(remote)
    if declared.keys and not now.access_control:
        fail("access control is off there, so there are no keys: set HALFWAY_MASTER_SECRET, or leave out keys")
    write = _show_key if keys_dir is None else partial(_write_key, keys_dir)
    own_key = public_id(token) if token and kind_in(token) is not None else None
    plan = Changes(remote, now, declared, prune=prune, write=write).plan(own_key)
    for step in plan.steps:
        _say(step.text)
    refusals = [step for step in plan.steps if not step.is_accepted()]
    if refusals:
        return 1
    for text in plan.kept:
        _say(f"  kept, though the file does not name it (--prune removes it): {text}")
    if not plan.steps:
        say("nothing to do")
        return 0
    if dry_run:
        say(f"changes that are pending: {len(plan.steps)}")
        return PENDING_CHANGES
    if keys_dir is None and not show_keys and any(step.makes_key for step in plan.steps):
        fail("keys are to be made: say where they go, --keys-dir DIRECTORY, or --show-keys to print them once")
    left, refused = deque(plan.steps), 0
    try:
        while left:
            refused += not left[0].act()
            left.popleft()
    except SystemExit:
        complain("\n".join(["not done:", *(step.headline for step in left), "Run this again: what is done stays"]))
        raise
    finally:
        say(f"{len(plan.steps) - len(left) - refused} of {len(plan.steps)} changes are done")
    return min(refused, 1)


def _say(text: str) -> None:
    for line in text.split("\n"):
        say(printable(line))


def _show_key(remote: Remote, key: Key, body: dict[str, Any]) -> None:
    made = remote.ask("POST", path_of("keys"), body=body).get("key")
    if made is not None:
        say(f"{_key_text(key)}: {made}")


def _write_key(folder: Path, remote: Remote, key: Key, body: dict[str, Any]) -> None:
    """Make a key and write it to a file that only this user can read. An existing file ends the command."""
    if key[2] is not None:
        _show_key(remote, key, body)
        return
    path = folder / f"{key[0]}-{key[1]}.key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        fail(f"cannot create {str(path)!r} ({error.strerror}): remove it, or name another --keys-dir")
    made: dict[str, Any] = {}
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            made = remote.ask("POST", path_of("keys"), body=body)
            file.write(f"{made['key']}\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if "id" in made:
            remote.ask("DELETE", path_of("keys", made["id"]))  # nobody has it
        if isinstance(error, OSError):
            fail(f"cannot write {str(path)!r}: {error.strerror}")
        raise
