"""The file of `halfway apply`: what is wrong in it is named before anything is called, and what is written is read."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from halfway.app.cli import apply as declarations
from halfway.app.cli.apply import Deployment, Key, State, read_file, to_toml
from halfway.app.cli.main import halfway

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
    "an infinite limit": (GROUP + "limits = { prepares_per_s = inf }", "groups.shop: inf and nan"),
    "too many digits": (GROUP + f"limits = {{ pending = {'9' * 5000} }}", "is not TOML"),
    "too deep": ("x = " + "[" * 5000, "is not TOML"),
    "an unknown limit": (GROUP + "limits = { checks = 1 }", "groups.shop.limits.checks"),
    "a limit of 0": (GROUP + "limits = { pending = 0 }", "groups.shop.limits.pending"),
    "a date": (GROUP + "policy = { max_checks = 1979-05-27 }", "groups.shop.policy.max_checks"),
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


def test_a_file_without_keys_leaves_them_alone(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(GROUP)
    assert read_file(str(file)).keys is None
    file.write_text("keys = []")
    assert read_file(str(file)).keys == {}
