-- Take back what dead workers held and end what is overdue, a bounded amount per call.
-- ARGV: prefix, max lost leases per job, most jobs per call
-- Returns {requeued, dead-lettered, expired, workers removed}
local max_lost, budget = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local workers = prefix .. 'workers'
local requeued, dead, expired, removed = 0, 0, 0, 0
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, 8)) do
  local ids = redis.call('SRANDMEMBER', held_key(worker), budget)
  -- Oldest to the front: ids are time-ordered and requeue pushes to the left.
  table.sort(ids, function(a, b) return a > b end)
  for _, id in ipairs(ids) do
    local lost = redis.call('HINCRBY', job_key(id), 'c', 1)
    if lost >= max_lost then
      dead_letter(id, 'its worker was lost ' .. lost .. ' times', worker, '')
      dead = dead + 1
    else
      requeue(id, worker, max_lost)
      requeued = requeued + 1
    end
    budget = budget - 1
  end
  if redis.call('SCARD', held_key(worker)) == 0 then
    redis.call('ZREM', workers, worker)
    redis.call('DEL', prefix .. 'worker:' .. worker)
    redis.call('HDEL', prefix .. 'wanted', worker)
    ring('kind', 'worker', 'id', worker)
    removed = removed + 1
  end
  if budget <= 0 then break end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now, 'LIMIT', 0, math.max(budget, 0))) do
  -- A running one is its worker's to stop; a second later nobody is left to do it.
  local f = redis.call('HMGET', job_key(id), 'st', 'e')
  if f[1] == 'q' or tonumber(f[2]) + 1000 <= now then
    fail(id, 'expired', f[1] == 'q' and 'its deadline passed in the queue' or 'its deadline passed while it was running',
         '', '')
    if f[1] == 'r' then ring('kind', 'cancel', 'id', id) end
    expired = expired + 1
  end
end
if requeued > 0 then wake() end
return {requeued, dead, expired, removed}
