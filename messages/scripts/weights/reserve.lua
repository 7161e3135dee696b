-- Give a version's number to weights that no trainer announced, because an operator loaded or renamed them on workers.
-- ARGV: prefix, version, given_to, remember_s
-- Returns 0, also if it was given to the same before; else the newest number that is taken.
local weights, key, number = KEY.weights, KEY.version .. ARGV[2], tonumber(ARGV[2])
if redis.call('HGET', key, 'by') == ARGV[3] then return 0 end
local highest = tonumber(redis.call('HGET', weights, 'highest')) or 0
if number <= highest then return highest end
redis.call('HSET', key, 'st', 'given', 'by', ARGV[3], 'at', redis_ms())
redis.call('EXPIRE', key, ARGV[4])
redis.call('HSET', weights, 'highest', number)
return 0
