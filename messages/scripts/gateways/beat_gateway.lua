-- A gateway lives.
-- ARGV: prefix, gateway, alive_ms, joins, *clients
-- gateway: its name. alive_ms: until it beats again, at most. joins: the one of its clients that is new, '' for none.
-- Returns alive; or inherited: others took one of its clients for dead. It is not alive under this name any more.
local inherited = false
for i = 5, #ARGV do
  local client = ARGV[i]
  local heir = redis.call('HGET', KEY.gateways, client)
  if not heir then
    -- One that was inherited may have submitted more since: whoever comes inherits that, too.
    heir = client == ARGV[4] and '' or '-'
    redis.call('HSET', KEY.gateways, client, heir)
  end
  inherited = inherited or heir ~= ''
end
if inherited then return 'inherited' end
redis.call('SET', KEY.gateway .. ARGV[2], 1, 'PX', ARGV[3])
return 'alive'
