-- Close a transfer for joins. The announcement now carries the roster.
-- ARGV: prefix, epoch, announcement
local key = prefix .. 'epoch:' .. ARGV[2]
if redis.call('HGET', key, 'st') ~= 'joining' then return redis.call('HGET', key, 'st') or 'unknown' end
redis.call('HSET', key, 'm', ARGV[3], 'st', 'sealed')
ring('kind', 'weights', 'epoch', ARGV[2])
return 'ok'
