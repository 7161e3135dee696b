-- Renew a worker's lease, whatever it holds, and tell it what it may have missed.
-- ARGV: prefix, worker, lease_ms, status, join, heard, passed, can
-- status: an encoded WorkerStatus. join: 1 the first time. heard, passed: what the worker witnessed, see tick; '' and 0
-- for nothing. can: what its engine can do, as in claim; '' says nothing.
-- Returns {'FENCED'} if the lease had run out and the jobs are gone, else
--   {'OK', jobs held, committed version, epoch under way (0 for none), the pool's clock, 1 if it is to reap, workers}
-- One heartbeat in REAP_MS is told to reap, however many workers there are.
local REAP_MS = 200
local worker = ARGV[2]
local workers, key = KEY.workers, KEY.worker .. ARGV[2]
if ARGV[5] ~= '1' and not redis.call('ZSCORE', workers, worker) then
  leave_to_others(worker)
  return {'FENCED'}
end
local at, until_ms, reaped = tick(whole(ARGV[6]), whole(ARGV[7]))
local lease = at + tonumber(ARGV[3])
local joins = redis.call('ZADD', workers, lease, worker) == 1
if lease > until_ms then redis.call('HSET', clock_key, 'until', lease) end
redis.call('HSET', key, 'status', ARGV[4])
if (ARGV[8] or '') ~= '' then redis.call('HSET', needs_key, 'can:' .. ARGV[8], lease) end
if joins then roster_changed() end
local reaps = (at < reaped or at >= reaped + REAP_MS) and 1 or 0
if reaps == 1 then redis.call('HSET', clock_key, 'reaped', at) end
local weights = redis.call('HMGET', KEY.weights, 'committed', 'open')
return {'OK', redis.call('SCARD', held_key(worker)), whole(weights[1]) or 0, whole(weights[2]) or 0, at, reaps,
  redis.call('ZCARD', workers)}
