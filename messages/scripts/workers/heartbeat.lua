-- Renew a worker's lease, whatever it holds, and tell it what it may have missed.
-- ARGV: prefix, worker, lease_ms, status, join, heard, passed
-- status: an encoded WorkerStatus. join: 1 the first time. heard, passed: what the worker witnessed, see tick; '' and 0
-- for nothing.
-- Returns {'FENCED'} if the lease had run out and the jobs are gone, else
--   {'OK', jobs held, committed version, epoch under way (0 for none), the pool's clock}
local worker = ARGV[2]
local workers, key = prefix .. 'workers', prefix .. 'worker:' .. ARGV[2]
if ARGV[5] ~= '1' and not redis.call('ZSCORE', workers, worker) then
  leave_to_others(worker)
  return {'FENCED'}
end
local at = tick(whole(ARGV[6]), whole(ARGV[7]))
local lease = at + tonumber(ARGV[3])
redis.call('ZADD', workers, lease, worker)
if lease > (whole(redis.call('HGET', clock_key, 'until')) or 0) then redis.call('HSET', clock_key, 'until', lease) end
redis.call('HSET', key, 'status', ARGV[4])
if ARGV[5] == '1' then ring('kind', 'worker', 'id', worker) end
local weights = redis.call('HMGET', prefix .. 'weights', 'committed', 'open')
return {'OK', redis.call('SCARD', held_key(worker)), whole(weights[1]) or 0, whole(weights[2]) or 0, at}
