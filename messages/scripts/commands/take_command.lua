-- A worker takes a command it was given: once, and only while the command lasts.
-- ARGV: prefix, command_id, worker, token
-- token: of this call.
-- Returns {encoded Command, milliseconds left}, or nothing.
local key, field = KEY.command .. ARGV[2], 'w:' .. ARGV[3]
local by = redis.call('HGET', key, field)
if not by or (by ~= '' and by ~= ARGV[4]) then return {} end
if by == '' then redis.call('HSET', key, field, ARGV[4]) end
local f = redis.call('HMGET', key, 'm', 'until')
-- Redis' clock may have been stepped back since, or nobody may have moved on the pool's: the earlier end counts.
local left = math.min(redis.call('PTTL', key), whole(f[2]) and whole(f[2]) - clock().now or math.huge)
return f[1] and left > 0 and {f[1], left} or {}
