"""Fault points: named places in the lane, in acquiring, in checks, in the scan and in giving shards back.

Only tests use them, and the product does not know of them: the table in `points.py` names a method for every numbered
step, and a launcher wraps those methods before it runs the ordinary command line:

    python -m tests.faults --in DIRECTORY serve

Without `--in` nothing is wrapped. Each step has two points, `<step>.before` and `<step>.after` (it returned; it did not
raise). What is to happen at a point is a `Fault`; the faults that hold now are those of `DIRECTORY/plan.json`, which
may be replaced while the process runs, so that a test can set the scene first. Hits are counted from then on.

From a test in `tests/acceptance` (fixture `faulty_coordinator`):

    coordinator = faulty_coordinator()             # a CoordinatorProcess with `faults`; not started yet
    coordinator.start()
    ...                                            # set the scene
    coordinator.faults.plan(Fault(point="lane.5.commit.before", action="kill"))
    ...                                            # do what leads there; a call ends with a lost connection
    await coordinator.killed_at_its_fault()        # fails where the point was not reached, or signal 9 did not end it
    coordinator.start()                            # the plan is empty again

Actions, each at the `hit`-th hit and at `times` hits in a row (0: at all from then on):

`kill`   SIGKILL to the process itself, after `seconds`, during which the step waits. With 50 ms the records that
         a step has produced are at the broker, in an open Kafka transaction; without they have not left the client.
`doom`   the same, but the step goes on meanwhile: the process is killed `seconds` later, wherever it is then.
`pause`  wait until `faults.release()`.
`delay`  wait for `seconds`.
`fail`   raise: a KafkaException with `code`, `fatal`, `retriable` and `txn_requires_abort`, else a FaultError.
`skip`   before a plain method: leave the step out, as if the protocol had not asked for it.
`initialise`  at `lane.write.before`: initialise the lane's own transactional id again, which the protocol forbids.
`note`   nothing but the line in `reached`.

`thread` narrows a point to threads whose name begins so: `halfway-suspects` for the suspects' lane, which takes the
same steps as the lane (`halfway-lane`). A coroutine waits without holding up its loop; a plain method holds up
its thread, which for those that run on the loop (`lane.answer`, `acquire.6.serve`) is the whole instance.

Every hit of a point in the plan is written to `DIRECTORY/reached.jsonl` with fsync before anything is done, so that a
test can tell what was reached: `faults.reached()`.
"""
