-- How did the transactions of each group end, and what share of them ended as their producers intended?
-- Reads verdicts (audit).
select "group", count(*) as transactions, count_if(verdict = 'committed_ok') as committed,
    count_if(verdict = 'rolled_back_ok') as rolled_back, count_if(verdict in ('pending', 'parked')) as open_still,
    round(count_if(verdict in ('committed_ok', 'rolled_back_ok')) / count(*), 4) as share_as_intended
from verdicts
group by "group"
order by transactions desc, "group"
