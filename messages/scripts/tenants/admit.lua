-- May a tenant make this request now? Rates are buckets that hold what a minute allows; a debt drains at the rate. Tokens are
-- charged as the most that it can cost, and `settle` gives back what it did not use. Who asked already pays nothing.
-- ARGV: prefix, tenant, request, tokens, requests_per_minute, tokens_per_minute, tokens_per_day, max_running, lease_ms
-- A limit of 0 is none. lease_ms: so long it counts as running.
-- Returns {ok or the limit that is reached, ms to wait, day}.
local spent, running = KEY.spent .. ARGV[2], KEY.admitted .. ARGV[2]
local request, tokens = ARGV[3], whole(ARGV[4]) or 0
local per_minute, tokens_per_minute, per_day, max_running = whole(ARGV[5]), whole(ARGV[6]), whole(ARGV[7]), whole(ARGV[8])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local day = math.floor(now / 86400000)
local f = redis.call('HMGET', spent, 'at', 'requests', 'tokens', 'day', 'used')
local at = whole(f[1]) or now
local passed = math.max(0, now - at)
if at > now then redis.call('HSET', spent, 'at', now) end   -- Redis' clock was set back
local function debt(text, limit)
  local owed = tonumber(text) or 0
  return owed > 0 and owed < 1e15 and math.max(0, owed - passed * limit / 60000) or 0
end
local requests, owed = debt(f[2], per_minute), debt(f[3], tokens_per_minute)
local used = f[4] == tostring(day) and whole(f[5]) or 0

local function answer(verdict, wait) return {verdict, math.ceil(wait), day} end
redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
if redis.call('ZSCORE', running, request) then return answer('ok', 0) end
if max_running > 0 and redis.call('ZCARD', running) >= max_running then return answer('max_running', 1000) end
if per_day > 0 and used + tokens > per_day then return answer('tokens_per_day', (day + 1) * 86400000 - now) end
if per_minute > 0 and requests + 1 > per_minute then
  return answer('requests_per_minute', (requests + 1 - per_minute) * 60000 / per_minute)
end
-- One that costs more than a minute allows goes when nothing is owed, and others wait until it is paid.
local over = owed + math.min(tokens, tokens_per_minute) - tokens_per_minute
if tokens_per_minute > 0 and over > 0 then return answer('tokens_per_minute', over * 60000 / tokens_per_minute) end

requests, owed = requests + 1, owed + tokens
redis.call('HSET', spent, 'at', now, 'requests', string.format('%.4f', requests), 'tokens', string.format('%.4f', owed),
  'day', day, 'used', used + tokens)
redis.call('EXPIRE', spent, 172800)
redis.call('ZADD', running, now + whole(ARGV[9]), request)
redis.call('EXPIRE', running, 172800)
return answer('ok', 0)
