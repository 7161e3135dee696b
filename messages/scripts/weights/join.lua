-- A worker with a lease joins a transfer that is still open for joins.
-- ARGV: prefix, epoch, worker, join
-- join: JSON.
-- Returns ok, nolease, or the state the transfer is in.
local key = prefix .. 'epoch:' .. ARGV[2]
local state = redis.call('HGET', key, 'st')
if state ~= 'joining' then
  -- Sent again after its reply was lost, and sealed meanwhile: it is in the roster, and must know.
  if state == 'sealed' and redis.call('HGET', key, 'join:' .. ARGV[3]) == ARGV[4] then return 'ok' end
  return state or 'unknown'
end
if not alive(ARGV[3]) then return 'nolease' end
redis.call('HSET', key, 'join:' .. ARGV[3], ARGV[4])
ring('kind', 'join', 'epoch', ARGV[2])
return 'ok'
