-- Begin a request with a key, or say what has become of it.
-- ARGV: prefix, request, digest, owner, seed, prompts, most_bytes, lasts_ms, about
-- request: <tenant>/<id>. digest: of its body. owner: the client of a gateway that is to run it. seed: what its jobs' ids
-- come from. most_bytes: no request begins while the answers that are kept have more. lasts_ms: how long it may run.
-- about: how its answer is shown.
-- Returns {state, seed, owner, answer}: new, running or done; other: it has another body; or {full, bytes}.
local FORGET = 64              -- entries of answers that are gone, in one call
local key, owner = KEY.request .. ARGV[2], ARGV[4]

for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEY.answered, '-inf', redis_ms(), 'LIMIT', 0, FORGET)) do
  redis.call('ZREM', KEY.answered, entry)
  redis.call('HINCRBY', load_key, 'answered', 0 - (whole(match(entry, ' (%d+)$')) or 0))
end
local digest, owns, seed, answer = unpack(redis.call('HMGET', key, 'digest', 'owner', 'seed', 'answer'))
if digest and digest ~= ARGV[3] then return {'other'} end
if answer then return {'done', seed or '', owns or '', answer} end
if seed == ARGV[5] then return {'new', seed, owner} end   -- the call came twice
-- An owner that is not registered is gone, and so is its heir, who could not finish this.
if seed and #seed == 32 and redis.call('HEXISTS', KEY.gateways, owns or '') == 1 then return {'running', seed, owns} end
local bytes = counted(redis.call('HGET', load_key, 'answered'))
if bytes > ARGV[7] + 0 then
  if redis.call('ZCARD', KEY.answered) > 0 then return {'full', bytes} end
  redis.call('HSET', load_key, 'answered', 0)
end
redis.call('DEL', key)
redis.call('HSET', key, 'digest', ARGV[3], 'owner', owner, 'seed', ARGV[5], 'prompts', ARGV[6], 'about', ARGV[9])
redis.call('PEXPIRE', key, ARGV[8])
return {'new', ARGV[5], owner}
