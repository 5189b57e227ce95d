-- On which days, in which groups, was something lost, doubled, leaked, changed or contradicted?
-- Reads anomalies (audit).
select cast(coalesce(prepared_at, ended_at) as date) as day, "group", verdict, count(*) as transactions
from anomalies
group by 1, 2, 3
order by day, "group", verdict
