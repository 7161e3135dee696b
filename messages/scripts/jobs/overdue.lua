-- End jobs that are past their deadline. Workers do it with every heartbeat; clients too, for a pool without workers.
-- ARGV: prefix, most, heard, passed, client
-- most: jobs that one call ends. heard, passed: what the caller witnessed, see tick. client: who asks, '' for nobody.
-- Returns {how many were ended, the pool's clock, the newest entry of the client's reply stream, '' for none, and the
--   number of its entries}
local at = tick(whole(ARGV[3]), whole(ARGV[4]))
local ended, replies = end_overdue(tonumber(ARGV[2])), prefix .. 'reply:' .. ARGV[5]
local newest = redis.call('XREVRANGE', replies, '+', '-', 'COUNT', 1)[1]
return {ended, at, newest and newest[1] or '', redis.call('XLEN', replies)}
