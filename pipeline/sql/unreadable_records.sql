-- Which topics hold records that cannot be read, and why?
-- Reads quarantine (audit or ledger).
select topic, error, count(*) as records, min("offset") as first_offset, max("offset") as last_offset
from quarantine
group by topic, error
order by records desc, topic, error
