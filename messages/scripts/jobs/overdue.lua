-- End jobs that are past their deadline. Workers do it with every heartbeat; clients too, for a pool without workers.
-- ARGV: prefix, most
-- most: jobs that one call ends.
-- Returns how many were ended.
return end_overdue(now_ms(), tonumber(ARGV[2]))
