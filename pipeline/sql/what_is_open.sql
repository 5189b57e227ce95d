-- What has not ended, by group and state, and since when (ms since 1970, UTC) has the oldest been waiting?
-- Reads pending (ledger).
select "group", state, count(*) as transactions, min(since) as oldest_since
from pending
group by "group", state
order by oldest_since, "group", state
