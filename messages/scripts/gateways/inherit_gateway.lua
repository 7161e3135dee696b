-- A gateway takes over a client of one that is dead, or whose heir is.
-- ARGV: prefix, client, heir
-- heir: the gateway that asks.
-- Returns ok; or no: somebody lives who has it, it is not registered, or it is the heir that is dead.
local client, heir = ARGV[2], ARGV[3]
local now = redis.call('HGET', KEY.gateways, client)
if not now or redis.call('EXISTS', KEY.gateway .. heir) == 0 then return 'no' end
if now == heir then return 'ok' end
local keeper = now == '' and match(client, '[^/]*$') or now
if redis.call('EXISTS', KEY.gateway .. keeper) == 1 then return 'no' end
redis.call('HSET', KEY.gateways, client, heir)
return 'ok'
