-- A transfer is over; the version is committed, also by the workers' own reports, or not.
-- ARGV: prefix, epoch, version, state, remember_s, digest, holder, lost
-- version: <name>@<version> of an adapter. state: committed or failed. digest: of the version's tensors. holder: JSON of
-- where its sender offers it from now on. lost: JSON worker -> why it did not report.
-- Returns the state that the version is in.
local weights, key, version = KEY.weights, KEY.epoch .. ARGV[2], KEY.version .. ARGV[3]
-- Not a transfer that Redis has lost with its data: the next one of that number is another one.
if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'st', 'closed', 'lost', ARGV[8]) end
redis.call('EXPIRE', key, ARGV[5])
if redis.call('HGET', weights, 'open') == ARGV[2] then redis.call('HSET', weights, 'open', 0) end
if ARGV[4] == 'committed' then
  commit(ARGV[3], ARGV[2], ARGV[5], ARGV[6])
else
  local before = redis.call('HMGET', version, 'st', 'epoch')
  if before[1] ~= 'committed' and (before[1] ~= ARGV[4] or before[2] ~= ARGV[2]) then
    redis.call('HSET', version, 'st', ARGV[4], 'epoch', ARGV[2], 'closed', redis_ms())
    redis.call('EXPIRE', version, ARGV[5])
    ring('kind', 'weights', 'epoch', ARGV[2], 'over', 1)   -- whoever still prepares it stops
  end
end
local adapter, number = string.match(ARGV[3], '^(.+)@(%d+)$')
if redis.call('HGET', version, 'st') == 'committed' and ARGV[7] ~= '' then
  if not adapter and redis.call('HGET', weights, 'committed') == ARGV[3] then
    redis.call('HSET', KEY.holders, '', ARGV[7])
  elseif adapter and redis.call('HGET', weights, 'adapter:' .. adapter) == number then
    redis.call('HSET', weights, 'at:' .. adapter, ARGV[7])
  end
end
return redis.call('HGET', version, 'st')
