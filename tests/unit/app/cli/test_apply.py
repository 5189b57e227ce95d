"""The file of `halfway apply`: what is wrong in it is named before anything is called, and what is written is read."""

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from halfway.app.cli import apply as declarations
from halfway.app.cli.apply import Deployment, Key, State, Step, read_file, to_toml
from halfway.app.cli.main import halfway
from halfway.app.cli.remote import Remote
from halfway.coordinator.requests import ServiceLimits

GROUP = '[groups.shop]\ncheck = { mode = "pull" }\ntopics = ["orders"]\n'
WRONG = {
    "not TOML": ("[groups", "is not TOML"),
    "an unknown table": ("[topics]", "unknown: topics: the file has tables [groups.NAME] and [[keys]] only"),
    "a group that is no table": ("groups = { shop = 1 }", "groups must be tables"),
    "a group's name": ('[groups."a b"]', "groups.'a b'"),
    "a missing field": ('[groups.shop]\ntopics = ["orders"]', "groups.shop.check"),
    "no check": ('[groups.shop]\ncheck = {}\ntopics = ["orders"]', "groups.shop.check"),
    "a URL": ('[groups.shop]\ncheck = { urls = ["shop"] }\ntopics = ["orders"]', "groups.shop.check.urls[0]"),
    "a URL with a password": (
        '[groups.shop]\ncheck = { urls = ["http://a:b@c/"] }\ntopics = ["orders"]',
        'groups.shop.check.urls[0]: "http://...@c/" is not valid',
    ),
    "an infinite limit": (
        GROUP + "limits = { prepares_per_s = inf }",
        "groups.shop.limits.prepares_per_s: inf and nan",
    ),
    "too many digits": (GROUP + f"limits = {{ pending = {'9' * 5000} }}", "is not TOML"),
    "too deep": ("x = " + "[" * 5000, "is not TOML"),
    "an unknown limit": (GROUP + "limits = { checks = 1 }", "groups.shop.limits.checks"),
    "a field of the API alone": (GROUP + "validate_only = true", "groups.shop.validate_only: not a field of the file"),
    "a limit of 0": (GROUP + "limits = { pending = 0 }", "groups.shop.limits.pending"),
    "a date": (GROUP + "policy = { max_checks = 1979-05-27 }", "groups.shop.policy.max_checks: 1979-05-27 is a date"),
    "a date as a topic": (
        '[groups.shop]\ncheck = { mode = "pull" }\ntopics = ["orders", 1979-05-27]',
        "groups.shop.topics[1]: 1979-05-27 is a date or time in TOML: if it is a name, put it in quotes",
    ),
    "a time as a name": ('[[keys]]\nkind = "group"\nname = 07:32:00', "keys[0].name: 07:32:00 is a date or time"),
    "a kind of key": ('[[keys]]\nkind = "admin"\nname = "a"', "keys[0].kind"),
    "a key itself": ('[[keys]]\nkind = "group"\nname = "a"\nkey = "hw_g_"', "keys[0].key"),
    "a key twice": ('[[keys]]\nkind = "group"\nname = "a"\n' * 2, "keys[1]: the key of group a is named twice"),
    "keys that are no list": ("keys = 1", "[[keys]]"),
}


@pytest.mark.parametrize("text, named", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    """The URL leads nowhere: a call would be another error."""
    ended = CliRunner().invoke(halfway, ["apply", "-", "--url", "http://127.0.0.1:1"], input=text)
    assert ended.exit_code == 1
    assert named in ended.stderr, ended.stderr


def test_a_coordinator_that_is_gone_has_refused_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends there: else each of forty groups would be told as refused."""
    step = Step(text="+ group shop", act=bool, try_out=partial(Remote("http://127.0.0.1:1", None).ask, "GET", "/v1"))
    with pytest.raises(SystemExit):
        step.is_accepted()
    told = capsys.readouterr().err
    assert "did not answer" in told
    assert "nothing is changed" in told
    assert "refused" not in told.replace("Connection refused", "").replace("Connect call failed", "")


NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
STATES = st.builds(
    State,
    mode=st.just("push"),
    urls=st.lists(
        st.sampled_from(["http://a/", 'http://b/?x="\\', "https://ü.example/\u2028?q=\U0001f600\x7f"]),
        min_size=1,
        unique=True,
    ).map(tuple),
    topics=st.lists(NAMES, min_size=1, unique=True).map(tuple),
    policy=st.fixed_dictionaries({}, optional={"max_checks": st.integers(1, 9), "max_age_s": st.floats(1e-9, 1e7)}),
    limits=st.fixed_dictionaries({}, optional={"pending": st.integers(1, 10**9)}),
    reject_prepares=st.booleans(),
)
KEYS = st.tuples(st.sampled_from(["group", "operator"]), NAMES, st.none() | st.just('subject:CN="a\\b"'))


@given(groups=st.dictionaries(NAMES, STATES, max_size=3), keys=st.lists(KEYS, unique=True, max_size=3))
def test_what_is_exported_is_toml_with_the_same_content(groups: dict[str, State], keys: list[Key]) -> None:
    read: dict[str, Any] = tomllib.loads(to_toml(Deployment(groups=groups, keys={key: ["id"] for key in keys})))
    assert read.get("groups", {}) == {name: state.body() for name, state in groups.items()}
    assert {(one["kind"], one["name"], one.get("certificate")) for one in read.get("keys", [])} == set(keys)


def test_an_existing_key_file_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the key made, which nobody would have."""
    (tmp_path / "group-shop.key").write_text("of before")
    monkeypatch.setattr(declarations, "read_deployment", lambda _: Deployment(groups={}, keys={}))
    text = '[[keys]]\nkind = "group"\nname = "shop"\n'
    arguments = ["apply", "-", "--url", "http://127.0.0.1:1", "--keys-dir", str(tmp_path)]
    ended = CliRunner().invoke(halfway, arguments, input=text)
    assert (ended.exit_code, "group-shop.key" in ended.stderr) == (1, True)
    assert "not done:\n+ key of group shop" in ended.stderr
    assert "+ key of group shop, though there is no such group\n" in ended.stdout
    assert "0 of 1 changes are done" in ended.stdout
    assert (tmp_path / "group-shop.key").read_text() == "of before"


def _certificates(*names: str) -> str:
    return "".join(f"[[keys]]\nkind = 'group'\nname = 'shop'\ncertificate = 'DNS:{name}'\n" for name in names)


STATE = State(mode="pull", urls=(), topics=("books",), policy={}, limits={}, reject_prepares=False)
EXCESS = {
    "groups": ("".join(GROUP.replace("shop", name) for name in ("a", "b", "c")), "groups: there would be 4, at most 3"),
    "keys": ("".join(f"[[keys]]\nkind = 'group'\nname = '{name}'\n" for name in "abc"), "would be 6, at most 5"),
    "certificates": (_certificates("a", "b"), "group 'shop' would have 3 certificates, at most 2"),
    "a bound one": (_certificates("c").replace("'shop'", "'books'"), "'DNS:c' would be bound 2 times, at most 1"),
}


@pytest.mark.parametrize("option", ["--dry-run", "--show-keys"])
@pytest.mark.parametrize("text, named", EXCESS.values(), ids=EXCESS)
def test_too_many_are_refused_before_the_first_change(
    text: str, named: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator would take the first of them; the URL leads nowhere."""
    keys: dict[Key, list[str]] = {("group", "shop", "DNS:c"): ["1"], ("operator", "x", None): ["2"]}
    now = Deployment(groups={"books": STATE}, keys=keys, expired_keys=1)
    monkeypatch.setattr(declarations, "read_deployment", lambda _: now)
    monkeypatch.setattr(declarations, "MAX_KEYS", 5)
    monkeypatch.setattr(ServiceLimits, "max_groups", 3)
    ended = CliRunner().invoke(halfway, ["apply", "-", "--url", "http://127.0.0.1:1", option], input=text)
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert named in ended.stderr, ended.stderr
    assert "name fewer, or remove some first" in ended.stderr


@pytest.mark.parametrize("text", ["", "keys = []", '[[keys]]\nkind = "group"\nname = "shop"\n'])
def test_a_file_that_names_no_group_prunes_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is mostly the output of a command that failed. The URL leads nowhere."""
    monkeypatch.setattr(declarations, "read_deployment", lambda _: Deployment(groups={"books": STATE}, keys={}))
    arguments = ["apply", "-", "--url", "http://127.0.0.1:1", "--prune", "--show-keys"]
    ended = CliRunner().invoke(halfway, arguments, input=text)
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "the file names no group, and --prune would remove all that there are (1)" in ended.stderr


def test_a_file_without_keys_leaves_them_alone(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(GROUP)
    assert read_file(str(file)).keys is None
    file.write_text("keys = []")
    assert read_file(str(file)).keys == {}
