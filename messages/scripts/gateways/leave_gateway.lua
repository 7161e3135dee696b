-- A client of a gateway is no more: nothing is left of it, or another gateway is to see to that.
-- ARGV: prefix, client, heir, to
-- heir: the gateway that has inherited it, '' for its own. to: '' for nobody, '-' for whoever comes.
-- Returns ok; or no: it is not the caller's any more.
if redis.call('HGET', KEY.gateways, ARGV[2]) ~= ARGV[3] then return 'no' end
if ARGV[4] == '' then redis.call('HDEL', KEY.gateways, ARGV[2]) else redis.call('HSET', KEY.gateways, ARGV[2], ARGV[4]) end
return 'ok'
