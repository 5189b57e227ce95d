-- How many messages and bytes did each group publish on each day (UTC)?
-- Reads ended (ledger).
select ended_date, "group", count(*) as transactions, sum(messages) as messages, sum(size) as bytes
from ended
where outcome = 'committed'
group by ended_date, "group"
order by ended_date, "group"
