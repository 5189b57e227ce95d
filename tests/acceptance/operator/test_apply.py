"""`halfway apply` and `halfway export` on deployments with access control."""

import stat
import tomllib
from pathlib import Path

from click.testing import CliRunner, Result

from halfway.app.cli.main import halfway
from halfway.app.cli.remote import Remote
from halfway.protocol.keys import FORM, RANDOM_BYTES, key_text
from halfway.protocol.principal import PrincipalKind
from tests.support.coordinator.process import CoordinatorProcess, NewCoordinator

OPERATOR = key_text(PrincipalKind.OPERATOR, bytes(range(RANDOM_BYTES)))
KEYED = {"HALFWAY_OPEN_ACCESS": "false", "HALFWAY_MASTER_SECRET": "m" * 32, "HALFWAY_OPERATOR_KEY": OPERATOR}
SHOP = """
[groups.shop]
check = { urls = ["http://127.0.0.1:9/check?token=hidden"] }
topics = ["{topic}", "coupons"]
policy = { max_checks = 5, first_check_after_s = 3600 }
limits = { pending = 100, prepares_per_s = 2.5 }

[[keys]]
kind = "group"
name = "shop"
"""
OTHERS = """
[groups."books.v2"]
check = { mode = "pull" }
topics = ["books"]
reject_prepares = true

[[keys]]
kind = "operator"
name = "alice"

[[keys]]
kind = "reader"
name = "dashboard"
certificate = "DNS:dashboard.svc"
"""


class Operator:
    """Runs commands against one deployment, with the first operator's key if no other is given."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._url = coordinator.url

    def run(self, *arguments: str, token: str = OPERATOR, given: str | None = None) -> Result:
        environment = {"HALFWAY_URL": self._url, "HALFWAY_TOKEN": token}
        ended = CliRunner().invoke(halfway, arguments, env=environment, input=given)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exc_info
        return ended

    def apply(self, text: str, *options: str, status: int, token: str = OPERATOR) -> str:
        ended = self.run("apply", "-", *options, token=token, given=text)
        assert ended.exit_code == status, ended.output
        return ended.output

    def export(self) -> str:
        ended = self.run("export")
        assert ended.exit_code == 0, ended.output
        return ended.stdout


def test_a_file_is_applied_once_and_replayed_elsewhere(new_coordinator: NewCoordinator, tmp_path: Path) -> None:
    """The export of a deployment, applied to an empty one with another prefix and number of shards, is its export."""
    first, second = (Operator(new_coordinator(KEYED | {"HALFWAY_SHARDS": shards}).start()) for shards in ("2", "3"))
    text, folder = (SHOP + OTHERS).replace("{topic}", "orders"), tmp_path / "keys"
    empty = first.export()
    planned = first.apply(text, "--dry-run", status=3)
    for shown in ("+ group shop", "+ topic coupons", "policy.max_checks: default -> 5", "new transactions: refused"):
        assert shown in planned
    assert "hidden" not in planned
    assert "--keys-dir" in first.apply(text, status=1)
    wrong = text.replace("127.0.0.1", "169.254.169.254")
    for option in ("--dry-run", "--show-keys"):
        assert "refused, so nothing is changed: + group shop" in first.apply(wrong, option, status=1)
    assert first.export() == empty

    done = first.apply(text, "--keys-dir", str(folder), status=0)
    assert not FORM.search(done)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "group-shop.key": 0o600,
        "operator-alice.key": 0o600,
    }
    keys = {path.stem: path.read_text().strip() for path in folder.iterdir()}
    for options in ((), ("--dry-run",), ("--prune", "--dry-run")):
        assert first.apply(text, *options, status=0).endswith("nothing to do\n")

    denied = first.apply(text, status=1, token=keys["group-shop"])
    assert "403" in denied
    assert first.run("export", token=keys["group-shop"]).exit_code == 1

    exported = first.export()
    assert not FORM.search(exported)
    assert tomllib.loads(exported)["groups"]["shop"]["limits"] == {"pending": 100, "prepares_per_s": 2.5}
    printed = second.apply(exported, "--show-keys", status=0)
    assert len(FORM.findall(printed)) == 2
    assert second.export() == exported
    assert second.apply(exported, "--prune", status=0).endswith("nothing to do\n")


def test_nothing_is_removed_unasked_and_no_group_in_use(new_coordinator: NewCoordinator, topic: str) -> None:
    coordinator = new_coordinator(KEYED).start()
    operator, remote = Operator(coordinator), Remote(coordinator.url, OPERATOR)
    shop = SHOP.replace("{topic}", topic)
    made = [key[0] for key in FORM.finditer(operator.apply(shop + OTHERS, "--show-keys", status=0))]
    alice = next(key for key in made if key.startswith("hw_o_"))
    remote.ask("PATCH", "/v1/groups/shop", body={"topics": ["late"], "policy": {"max_interval_s": 900}})
    less = shop.replace(', "coupons"', "").replace("pending = 100, ", "").replace("max_checks = 5", "max_checks = 6")
    changed = operator.apply(less, status=0)
    assert "policy.max_checks: 5 -> 6" in changed
    assert "kept, though the file does not name it" in changed
    kept = tomllib.loads(operator.export())["groups"]
    assert kept["shop"]["topics"] == [topic, "coupons", "late"]
    assert (kept["shop"]["limits"]["pending"], kept["shop"]["policy"]["max_interval_s"]) == (100, 900)
    assert "books.v2" in kept

    alone = OTHERS.replace('\n[[keys]]\nkind = "operator"\nname = "alice"\n', "")
    assert "would revoke the key of this command" in operator.apply(alone, "--prune", status=1, token=alice)

    prepared = remote.ask(
        "POST", "/v1/transactions", body={"group": "shop", "messages": [{"topic": topic, "value": "v"}]}
    )
    planned = operator.apply(alone, "--prune", "--dry-run", status=3)
    for removed in ("- group shop", "- key of group shop", "- key of operator alice"):
        assert removed in planned
    refused = operator.apply(alone, "--prune", status=1)
    assert "1 pending and 0 parked" in refused
    left = tomllib.loads(operator.export())
    assert "shop" in left["groups"]
    assert [(key["kind"], key["name"]) for key in left["keys"]] == [("group", "shop"), ("reader", "dashboard")]
    remote.ask("POST", f"/v1/transactions/{prepared['id']}/end", body={"outcome": "rollback"})
    operator.apply(alone, "--prune", status=0)
    left = tomllib.loads(operator.export())
    assert (list(left["groups"]), [key["name"] for key in left["keys"]]) == (["books.v2"], ["dashboard"])
