-- Which committed transactions have fewer or more messages in their topics than were prepared?
-- Reads verdicts (audit).
select id, life, "group", verdict, topics, expected, found
from verdicts
where verdict in ('lost', 'torn', 'doubled') and expected > 0
order by id, life
