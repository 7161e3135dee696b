-- A shard learns what the home of its pool has committed: claims look at it. Whoever knows may say it, and again.
-- ARGV: prefix, committed, *adapters (name, version)
-- committed: the newest version of the weights, 0 to say nothing of it.
-- An adapter has a number of its own in each shard, by which jobs wait for it there (see close).
local weights = KEY.weights
local function newer(field, version)
  return tonumber(version) > (whole(redis.call('HGET', weights, field)) or 0)
end
if newer('committed', ARGV[2]) then redis.call('HSET', weights, 'committed', ARGV[2]) end
for i = 3, #ARGV, 2 do
  local field, number = 'adapter:' .. ARGV[i], 'number:' .. ARGV[i]
  if newer(field, ARGV[i + 1]) then redis.call('HSET', weights, field, ARGV[i + 1]) end
  if not redis.call('HGET', weights, number) then
    redis.call('HSET', weights, number, redis.call('HINCRBY', weights, 'adapters', 1))
  end
end
return 'ok'
