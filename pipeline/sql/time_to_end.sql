-- How long does it take from prepare to outcome, by group? Half, 95 and 99 of 100 transactions end within these times.
-- Reads ended (ledger).
select "group", count(*) as transactions, percentile_cont(0.5) within group (order by latency_ms) as p50_ms,
    percentile_cont(0.95) within group (order by latency_ms) as p95_ms,
    percentile_cont(0.99) within group (order by latency_ms) as p99_ms, max(latency_ms) as longest_ms
from ended
group by "group"
order by p99_ms desc, "group"
