-- The pool has no committed version any more: its workers' checkpoint is what it has. Numbers that were given stay taken.
-- ARGV: prefix, version
-- version: what the caller found committed.
-- Returns 0, or the version that is committed instead.
local weights = KEY.weights
local said = redis.call('HMGET', weights, 'committed', 'highest')
local committed = whole(said[1]) or 0
if committed ~= tonumber(ARGV[2]) then return committed end   -- sent twice; or another one came
if committed > (whole(said[2]) or 0) then redis.call('HSET', weights, 'highest', committed) end
redis.call('HSET', weights, 'committed', 0, 'digest', '', 'open', 0)
redis.call('UNLINK', KEY.holders)
return 0
