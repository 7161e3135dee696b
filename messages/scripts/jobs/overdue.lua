-- End jobs that are past their deadline. Workers do it with every heartbeat; clients too, for a pool without workers.
-- ARGV: prefix, most, heard, passed
-- most: jobs that one call ends. heard, passed: what the caller witnessed, see tick.
-- Returns {how many were ended, the pool's clock}
local at = tick(whole(ARGV[3]), whole(ARGV[4]))
return {end_overdue(tonumber(ARGV[2])), at}
