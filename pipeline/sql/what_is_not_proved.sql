-- For which share of each group's transactions does the audit prove nothing? A large share: audit more often.
-- Reads verdicts (audit).
select "group", count_if(verdict = 'unproved') as unproved, count_if(verdict = 'not_judged') as not_judged,
    count_if(verdict = 'expired_unknown') as expired,
    round(count_if(verdict in ('unproved', 'not_judged', 'expired_unknown')) / count(*), 4) as share
from verdicts
group by "group"
order by share desc, "group"
