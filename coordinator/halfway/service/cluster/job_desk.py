"""Jobs through any instance: each runs on the owner of the shard that its id hashes to, and is asked for everywhere."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

import msgspec

from halfway.domain.audit_trail import Audited
from halfway.domain.errors import HalfwayError, JobIdReusedError, ShardUnavailableError, UnknownJobError
from halfway.domain.ids import partition_for_key
from halfway.domain.principal import ANYBODY, Permission
from halfway.service.cluster.job_work import PERMISSIONS
from halfway.service.job_records import AllJobs, Away, ItemResult, JobList, JobPage, JobSpec, JobView
from halfway.service.jobs.jobs import MOST_OF_GROUP
from halfway.service.peer_calls import JobCall, JobsCall, KnownJobCall, PeerCall, StartJobCall, StopJobCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfway.domain.principal import Principal
    from halfway.service.audit_trail import Auditor
    from halfway.service.cluster.forward import Forwarder
    from halfway.service.cluster.job_work import JobWork
    from halfway.service.jobs.jobs import Jobs
    from halfway.service.peer_calls import OnJobs
    from halfway.service.ports import Authority, OwnerHint
    from halfway.service.requests import TransactionView
    from halfway.service.shards.shard_table import ShardTable

T = TypeVar("T")

_ASK_S = 5.0
"""How long another instance may take to say what it knows of jobs."""


class JobDesk:
    """Starts, shows and stops jobs, wherever they run."""

    def __init__(
        self,
        jobs: Jobs,
        work: JobWork,
        forwarding: Forwarder,
        shards: ShardTable,
        authority: Authority,
        auditor: Auditor,
    ) -> None:
        """Keep the parts."""
        self._jobs = jobs
        self._work = work
        self._forwarder = forwarding
        self._shards = shards
        self._authority = authority
        self._auditor = auditor

    async def preview(
        self, spec: JobSpec, *, sample: int, deadline: float, principal: Principal = ANYBODY
    ) -> tuple[int, Sequence[TransactionView]]:
        """Count what a job would act on now, and show the oldest `sample` of what its filter finds."""
        spec = self._allowed(spec, principal)
        return await self._work.sample(spec, sample, deadline=deadline, principal=principal)

    async def start(self, spec: JobSpec, *, deadline: float, principal: Principal = ANYBODY) -> JobView:
        """Accept a job, unless it is there; nothing is done yet when this returns.

        Raises:
            JobIdReusedError: the id is another job's.
            OverloadedError: too many jobs are not over.
            ShardUnavailableError: nobody can take it now.

        """
        spec = self._allowed(spec, principal)
        return await self._auditor.of(
            self._start(spec, deadline, principal),
            principal,
            Audited.START_JOB,
            spec.id,
            group=None if spec.filter is None else spec.filter.group,
            remark=spec.reason,
            detail=spec.action.value,
        )

    def _allowed(self, spec: JobSpec, principal: Principal) -> JobSpec:
        """Return a job as this caller may ask for it: a group's key asks for its own transactions."""
        self._authority.require(principal, Permission.RUN_JOBS)
        given = spec.filter
        if given is not None and given.group is None and principal.group is not None:
            given = msgspec.structs.replace(given, group=principal.group)
        group = None if given is None else given.group
        self._authority.require(principal, PERMISSIONS[spec.action], group)
        if given is not None and given.key is not None:  # whoever may search for a message key can guess it
            self._authority.require(principal, Permission.READ_PAYLOADS, group)
        most = spec.most if principal.group is None else min(spec.most, MOST_OF_GROUP)
        return msgspec.structs.replace(spec, filter=given, of_group=principal.group, most=most)

    async def _start(self, spec: JobSpec, deadline: float, principal: Principal) -> JobView:
        # After a move of its shard it may run elsewhere: it would run twice.
        with suppress(UnknownJobError):
            view: JobView = await self._one(
                lambda: self._jobs.known(spec, principal), KnownJobCall(spec=spec), spec.id, deadline, principal
            )
            return view
        return await self._forwarder.or_forward(
            self.start_here(spec, principal), lambda: StartJobCall(spec=spec), deadline, principal
        )

    async def start_here(self, spec: JobSpec, principal: Principal) -> JobView:
        """Accept a job if its shard is served here; NotServedError otherwise."""
        self._shards.get(partition_for_key(spec.id.encode(), self._shards.count))
        return self._jobs.start(spec, principal)

    async def page(
        self,
        job_id: str,
        *,
        result: ItemResult | None,
        start: int,
        limit: int,
        deadline: float,
        principal: Principal = ANYBODY,
    ) -> JobPage:
        """Show a job and some of its items.

        Raises:
            UnknownJobError: no instance has it.
            ShardUnavailableError: none of those that could be asked has it.

        """
        self._authority.require(principal, Permission.LIST_JOBS)
        call = JobCall(id=job_id, result=result, start=start, limit=limit)
        page: JobPage = await self._one(lambda: self.page_here(call, principal), call, job_id, deadline, principal)
        return page

    def page_here(self, call: JobCall, principal: Principal) -> JobPage:
        """Show a job of this instance."""
        return self._jobs.page(call.id, result=call.result, start=call.start, limit=call.limit, principal=principal)

    async def stop(self, job_id: str, *, deadline: float, principal: Principal = ANYBODY) -> JobView:
        """Have a job begin nothing more; errors as for `page`."""
        self._authority.require(principal, Permission.RUN_JOBS)
        call = StopJobCall(id=job_id)
        work = self._one(lambda: self._jobs.stop(job_id, principal), call, job_id, deadline, principal)
        view: JobView = await self._auditor.of(work, principal, Audited.STOP_JOB, job_id)
        return view

    async def all(self, *, deadline: float, principal: Principal = ANYBODY) -> AllJobs:
        """Show the jobs of every instance that can be asked, and name those that cannot."""
        self._authority.require(principal, Permission.LIST_JOBS)
        found, away = await self._asked(lambda: self._jobs.all(principal), JobsCall(), deadline, principal)
        lists: list[JobList] = found
        jobs = sorted(
            (job for one in lists for job in one.jobs), key=lambda job: (job.accepted_at, job.spec.id), reverse=True
        )
        return AllJobs(jobs=tuple(jobs), away=tuple(away))

    async def answer(self, call: OnJobs, _: float, principal: Principal) -> msgspec.Struct:
        """Do a call of another instance with the jobs of this one."""
        starts = isinstance(call, StartJobCall | KnownJobCall | StopJobCall)
        self._authority.require(principal, Permission.RUN_JOBS if starts else Permission.LIST_JOBS)
        match call:
            case StartJobCall():
                return await self.start_here(call.spec, principal)
            case KnownJobCall():
                return self._jobs.known(call.spec, principal)
            case JobCall():
                return self.page_here(call, principal)
            case StopJobCall():
                return self._jobs.stop(call.id, principal)
            case JobsCall():
                return self._jobs.all(principal)
            case _:
                assert_never(call)

    async def _one(
        self, here: Callable[[], Any], call: PeerCall, job_id: str, deadline: float, principal: Principal
    ) -> Any:
        found, away = await self._asked(here, call, deadline, principal)
        if found:
            return found[0]
        if away:
            told = "; ".join(f"{one.instance}: {one.detail}" for one in away)
            raise ShardUnavailableError(f"job {job_id!r} is at no instance that could be asked ({told}): try again")
        raise UnknownJobError(job_id)

    async def _asked(
        self, here: Callable[[], T], call: PeerCall, deadline: float, principal: Principal
    ) -> tuple[list[T], list[Away]]:
        """Ask this instance, then all others; return what was found, and who could not be asked."""
        found: list[T] = []
        with suppress(UnknownJobError):
            found.append(here())
        if found and not isinstance(call, JobsCall):
            return found, []
        owners = self._forwarder.others()
        until = min(deadline, asyncio.get_running_loop().time() + _ASK_S)
        asked = [self._forwarder.ask(owner, call, deadline=until, principal=principal) for owner in owners]
        return self._sorted(found, owners, await asyncio.gather(*asked, return_exceptions=True))

    @staticmethod
    def _sorted(found: list[T], owners: list[OwnerHint], answers: list[Any]) -> tuple[list[T], list[Away]]:
        away: list[Away] = []
        for owner, answer in zip(owners, answers, strict=True):
            match answer:
                case UnknownJobError():
                    pass
                case JobIdReusedError():
                    raise answer
                case HalfwayError():
                    away.append(Away(instance=owner.url, detail=answer.detail))
                case BaseException():
                    raise answer
                case _:
                    found.append(answer)
        return found, away
