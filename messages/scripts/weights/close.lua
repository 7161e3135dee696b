-- A transfer is over; the version is committed or not. A committed version never goes back.
-- ARGV: prefix, epoch, version, state, remember_s, digest
-- version: <name>@<version> of an adapter. state: committed or failed. digest: of the version's tensors.
-- An adapter gets its number in the pool, by which jobs wait for it, with its first committed version.
local weights, key = prefix .. 'weights', prefix .. 'epoch:' .. ARGV[2]
-- Not a transfer that Redis has lost with its data: the next one of that number is another one.
if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'st', 'closed') end
redis.call('EXPIRE', key, ARGV[5])
if redis.call('HGET', weights, 'open') == ARGV[2] then redis.call('HSET', weights, 'open', 0) end
local version = prefix .. 'version:' .. ARGV[3]
local before = redis.call('HMGET', version, 'st', 'epoch')
if before[1] ~= 'committed' and (before[1] ~= ARGV[4] or before[2] ~= ARGV[2]) then
  redis.call('HSET', version, 'st', ARGV[4], 'epoch', ARGV[2], 'closed', redis_ms())
end
redis.call('EXPIRE', version, ARGV[5])
local adapter, number = string.match(ARGV[3], '^(.+)@(%d+)$')
local newest = adapter and 'adapter:' .. adapter or 'committed'
number = number or ARGV[3]
if ARGV[4] == 'committed' and tonumber(number) > (tonumber(redis.call('HGET', weights, newest)) or 0) then
  redis.call('HSET', weights, newest, number)
  if not adapter then
    redis.call('HSET', weights, 'digest', ARGV[6] or '')
  elseif not redis.call('HGET', weights, 'number:' .. adapter) then
    redis.call('HSET', weights, 'number:' .. adapter, redis.call('HINCRBY', weights, 'adapters', 1))
  end
end
ring('kind', 'weights', 'epoch', ARGV[2])
return 'ok'
