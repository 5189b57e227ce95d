"""One client in a parent process and its forked children, as in servers that fork their workers."""

from pathlib import Path

from tests.support.rest.client import RestWorld
from tests.unit.client.test_scopes import run

SERVICE = """
import os, sys, threading, warnings
from halfway.client import Message, SyncHalfway

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
client = SyncHalfway(sys.argv[1], "shop", prepare_timeout_s=60, end_timeout_s=60)

def send(key):
    with client.transaction([Message(topic="orders", key=key, value="v")]):
        pass

send("before")
stop = threading.Event()
busy = [threading.Thread(target=lambda: [send("busy") for _ in iter(stop.is_set, True)]) for _ in range(3)]
for thread in busy:
    thread.start()
for number in range(5):
    child = os.fork()
    if child == 0:
        send(f"child-{number}")
        if number % 2:
            client.close()
        sys.exit()  # with all of Python's clean-up
    assert os.waitpid(child, 0)[1] == 0
    send(f"parent-{number}")
stop.set()
for thread in busy:
    thread.join()
send("after")
client.close()
"""


async def test_parent_and_children_use_one_client_side_by_side(world: RestWorld, tmp_path: Path) -> None:
    """The children's clean-up does not affect the parent; no lock that a thread held at the fork blocks them."""
    assert await run(SERVICE, world.url) == (0, "")
    keys = {record.key.decode() for record in world.memory.records("orders") if record.key is not None}
    assert keys == {"before", "busy", "after", *(f"{who}-{n}" for who in ("child", "parent") for n in range(5))}
    listed = (await world.call("GET", "/v1/transactions?group=shop&state=prepared")).body
    assert listed["transactions"] == []


LOCKED = """
import os, sys, threading, warnings
from halfway.client import CheckVerifier, SyncHalfway
from halfway.client import sqlalchemy
from halfway.client.threads import BoundedThreads

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
verifier, client = CheckVerifier("whsec_" + "A" * 40), SyncHalfway("http://127.0.0.1:1", "shop")
locks = [verifier._lock, client._lock, sqlalchemy._interception_lock]
held, done = threading.Event(), threading.Event()

def hold():
    with locks[0], locks[1], locks[2]:
        held.set()
        done.wait()

stuck = BoundedThreads(1, "stuck")
stuck.start(done.wait)
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    with locks[0], locks[1], locks[2]:
        os._exit(stuck.start(lambda: 7).result())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
done.set()
holder.join()
"""


async def test_no_lock_that_a_thread_holds_at_the_fork_blocks_the_child() -> None:
    """Locks of a client, of a verifier and of session producers; and threads with stuck checks."""
    assert await run(LOCKED) == (0, "")
