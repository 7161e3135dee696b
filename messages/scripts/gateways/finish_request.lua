-- Keep a request's answer for a while; the first one counts.
-- ARGV: prefix, request, seed, answer, keep_ms
-- request, seed: as they were begun. keep_ms: 0 to forget the request and its answer, -1 unless it has one.
-- Returns {state, answer}: kept; done, and the answer, if it has another one; or lost: it was forgotten, perhaps begun anew.
local request, keep_ms = ARGV[2], ARGV[5]
local key = KEY.request .. request
local seed, owner, answer = unpack(redis.call('HMGET', key, 'seed', 'owner', 'answer'))
if seed ~= ARGV[3] then return {'lost'} end
if keep_ms == '0' or keep_ms == '-1' then
  -- What an heir has will be finished, and what it has finished is not its owner's any more.
  if answer and keep_ms == '-1' then return {'lost'} end
  if not answer and redis.call('HGET', KEY.gateways, owner or '') ~= '' then return {'lost'} end
  redis.call('DEL', key)
  if answer and redis.call('ZREM', KEY.answered, request .. ' ' .. #answer) == 1 then
    redis.call('HINCRBY', load_key, 'answered', -#answer)
  end
  return {'kept'}
end
if answer then return answer == ARGV[4] and {'kept'} or {'done', answer} end
answer = ARGV[4]
redis.call('HSET', key, 'answer', answer)
redis.call('HDEL', key, 'prompts')
redis.call('PEXPIRE', key, keep_ms)
if redis.call('ZADD', KEY.answered, redis_ms() + keep_ms, request .. ' ' .. #answer) == 1 then
  redis.call('HINCRBY', load_key, 'answered', #answer)
end
return {'kept'}
