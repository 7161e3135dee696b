-- Requests of a tenant have ended, and get back the tokens that they did not use; or they still run. What nobody has said
-- of a request for the time of its lease counts as ended, and what it was charged stays charged.
-- ARGV: prefix, tenant, lease_ms, *requests
-- requests: rows of request, tokens to give back ("" while it runs), the day on which they were charged.
local spent, running = KEY.spent .. ARGV[2], KEY.admitted .. ARGV[2]
local t = redis.call('TIME')
local lease = t[1] * 1000 + math.floor(t[2] / 1000) + whole(ARGV[3])
for i = 4, #ARGV, 3 do
  local request, back = ARGV[i], whole(ARGV[i + 1])
  if not back then
    redis.call('ZADD', running, 'XX', lease, request)
  elseif redis.call('ZREM', running, request) == 1 then
    local f = redis.call('HMGET', spent, 'tokens', 'day', 'used')
    redis.call('HSET', spent, 'tokens', string.format('%.4f', math.max(0, (tonumber(f[1]) or 0) - back)))
    if f[2] == ARGV[i + 2] then redis.call('HSET', spent, 'used', math.max(0, (whole(f[3]) or 0) - back)) end
    redis.call('EXPIRE', spent, 172800)
  end
end
