-- Which groups leave it to check-backs, operators or the policy to end their transactions?
-- Reads ended (ledger).
select "group", count_if(cause = 'producer') as by_producer, count_if(cause = 'check') as by_check,
    count_if(cause = 'operator') as by_operator, count_if(cause = 'policy') as by_policy,
    round(1 - count_if(cause = 'producer') / count(*), 4) as share_of_others
from ended
group by "group"
order by share_of_others desc, "group"
