-- A worker that serves the newest version opens a transfer of it for waiting workers that no other transfer serves.
-- ARGV: prefix, epoch, version, announcement, remember_s, worker, over
-- over: an open transfer that is over, 0 for none.
-- The open transfer is the lock, so there is one at a time. It is over when the worker that opened it has lost its
-- lease, or when the caller has watched it past its deadline. A trainer does not ask: its announcement replaces any.
-- Returns ok, nolease, older (the version is not the newest), nobody (waits), busy, or the state the transfer is in.
local weights, key = prefix .. 'weights', prefix .. 'epoch:' .. ARGV[2]
local state = redis.call('HGET', key, 'st')
if state == 'joining' then return 'ok' end   -- a delayed copy
if state then return state end
if not alive(ARGV[6]) then return 'nolease' end
if redis.call('HGET', weights, 'committed') ~= ARGV[3] then return 'older' end
local waiting = false
local wanted = redis.call('HGETALL', prefix .. 'wanted')
for i = 1, #wanted, 2 do
  if not string.find(wanted[i], '@', 1, true)   -- else it is about an adapter
    and tonumber(wanted[i + 1]) < tonumber(ARGV[3]) and alive(wanted[i]) then
    waiting = true
    break
  end
end
if not waiting then return 'nobody' end
local open = redis.call('HGET', weights, 'open') or '0'
if open ~= '0' and open ~= ARGV[7] then
  local by = redis.call('HGET', prefix .. 'epoch:' .. open, 'by')
  if not by or alive(by) then return 'busy' end
end
redis.call('HSET', key, 'm', ARGV[4], 'st', 'joining', 'by', ARGV[6])
redis.call('EXPIRE', key, ARGV[5])
redis.call('UNLINK', epoch_before(ARGV[2]))
redis.call('HSET', weights, 'open', ARGV[2])
redis.call('EXPIRE', prefix .. 'version:' .. ARGV[3], ARGV[5])
ring('kind', 'weights', 'epoch', ARGV[2])
return 'ok'
