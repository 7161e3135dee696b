-- Renew a worker's lease, whatever it holds, and tell it what it may have missed.
-- ARGV: prefix, worker, lease_ms, status, join
-- status: an encoded WorkerStatus. join: 1 the first time.
-- Returns {'FENCED'} if the lease had run out and the jobs are gone, else
--   {'OK', jobs held, committed version, epoch under way (0 for none)}
local worker = ARGV[2]
local workers, key = prefix .. 'workers', prefix .. 'worker:' .. ARGV[2]
if ARGV[5] ~= '1' and not redis.call('ZSCORE', workers, worker) then return {'FENCED'} end
redis.call('ZADD', workers, now_ms() + tonumber(ARGV[3]), worker)
redis.call('HSET', key, 'status', ARGV[4])
if ARGV[5] == '1' then ring('kind', 'worker', 'id', worker) end
local weights = redis.call('HMGET', prefix .. 'weights', 'committed', 'open')
return {'OK', redis.call('SCARD', held_key(worker)), whole(weights[1]) or 0, whole(weights[2]) or 0}
