-- Take back the jobs of dead workers and end overdue jobs, a bounded number per call.
-- ARGV: prefix, max_lost, most
-- max_lost: leases that a job may lose. most: jobs that one call takes back.
-- Returns {requeued, dead-lettered, expired, workers removed}
local max_lost, budget = tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local requeued, dead, removed = 0, 0, 0
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'workers', '-inf', now, 'LIMIT', 0, 8)) do
  local ids = redis.pcall('SRANDMEMBER', held_key(worker), budget)
  if ids.err then                                   -- something else under this name
    redis.call('DEL', held_key(worker))
    ids = {}
  end
  -- Oldest to the front: ids are time-ordered and requeue pushes to the left.
  table.sort(ids, function(a, b) return a > b end)
  for _, id in ipairs(ids) do
    local f = redis.call('HMGET', job_key(id), 'st', 'w')
    if f[1] ~= 'r' or f[2] ~= worker then
      redis.call('SREM', held_key(worker), id)      -- its record was evicted or deleted by hand
    elseif redis.call('HINCRBY', job_key(id), 'c', 1) >= max_lost then
      local lost = redis.call('HGET', job_key(id), 'c')
      dead_letter(id, 'its worker was lost ' .. lost .. ' times', worker, '')
      dead = dead + 1
    else
      requeue(id, worker, max_lost)
      requeued = requeued + 1
    end
    budget = budget - 1
  end
  if redis.call('SCARD', held_key(worker)) == 0 then
    forget_worker(worker)
    removed = removed + 1
  end
  if budget <= 0 then break end
end
local expired = end_overdue(now, budget)
local undecided = end_preferences(now, budget)
-- Check one reply stream per call. If it has expired unread, its bytes are no longer counted.
local client = redis.call('HRANDFIELD', prefix .. 'unread')
if client and redis.call('EXISTS', prefix .. 'reply:' .. client) == 0 then nothing_unread(client) end
if requeued + undecided > 0 then wake() end
return {requeued, dead, expired, removed}
