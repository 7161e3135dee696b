-- A transfer is over; the version is committed or not. A committed version never goes back.
-- ARGV: prefix, epoch, version, committed|failed, seconds to remember it
local weights, key = prefix .. 'weights', prefix .. 'epoch:' .. ARGV[2]
redis.call('HSET', key, 'st', 'closed')
redis.call('EXPIRE', key, ARGV[5])
if redis.call('HGET', weights, 'open') == ARGV[2] then redis.call('HSET', weights, 'open', 0) end
local version = prefix .. 'version:' .. ARGV[3]
if redis.call('HGET', version, 'st') ~= 'committed' then redis.call('HSET', version, 'st', ARGV[4], 'epoch', ARGV[2]) end
redis.call('EXPIRE', version, ARGV[5])
if ARGV[4] == 'committed' and tonumber(ARGV[3]) > (tonumber(redis.call('HGET', weights, 'committed')) or 0) then
  redis.call('HSET', weights, 'committed', ARGV[3])
end
ring('kind', 'weights', 'epoch', ARGV[2])
return 'ok'
