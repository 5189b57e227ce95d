-- How many transactions were committed and rolled back in each hour (UTC)?
-- Reads ended (ledger).
select date_trunc('hour', ended_at) as hour, count_if(outcome = 'committed') as committed,
    count_if(outcome = 'rolled_back') as rolled_back
from ended
group by 1
order by hour
