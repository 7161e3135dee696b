-- Take back the jobs of dead workers and end overdue jobs, a bounded number per call.
-- ARGV: prefix, max_lost, most, heard, passed
-- max_lost: leases that a job may lose. most: jobs and workers, together, that one call is concerned with. heard, passed:
-- what the caller witnessed, see tick.
-- Returns {requeued, dead-lettered, expired, workers removed, 1 if there is more to do}
local max_lost, most = tonumber(ARGV[2]), tonumber(ARGV[3])
local MAX_BYTES = 4194304     -- of payloads of dead letters, after which one call takes back no further job
local now, left, bytes = tick(whole(ARGV[4]), whole(ARGV[5])), most, 0
local requeued, dead, removed = 0, 0, 0

-- Returns whether the job goes back; its record is damaged if not.
local function take_back(id, worker)
  local state, owner, nbytes = unpack(redis.call('HMGET', job_key(id), JOB.state, JOB.owner, JOB.nbytes))
  if state ~= 'r' or owner ~= worker then
    redis.call('SREM', held_key(worker), id)        -- its record was evicted or deleted by hand
  elseif redis.call('HINCRBY', job_key(id), JOB.lost, 1) >= max_lost then
    local lost = redis.call('HGET', job_key(id), JOB.lost)
    dead_letter(id, 'its worker was lost ' .. lost .. ' times', worker, '')
    dead, bytes, left = dead + 1, bytes + (whole(nbytes) or 0), left - 2   -- a letter takes as long as three jobs
  else
    requeue_or_suspect(id, worker, max_lost)
    requeued = requeued + 1
  end
end

for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEY.workers, '-inf', now, 'LIMIT', 0, most)) do
  if left <= 0 or bytes >= MAX_BYTES then break end
  local ids = redis.call('SRANDMEMBER', held_key(worker), left)
  table.sort(ids)   -- by time: suspects run in this order
  for _, id in ipairs(ids) do
    if bytes >= MAX_BYTES then break end
    if not attempt(take_back, id, worker) then
      dead_letter_damaged(id, 'its worker was lost, and its record is no record of a job')
      redis.call('SREM', held_key(worker), id)
      dead = dead + 1
    end
    left = left - 1
  end
  left = left - 1
  if redis.call('SCARD', held_key(worker)) == 0 then
    left = left - forget_worker(worker)
    removed = removed + 1
  end
end
if removed > 0 then redis.call('HINCRBY', load_key, 'leases_lost', removed) end
local expired = end_overdue(left)
expire_sessions()
local undecided = end_preferences(left - expired)
-- Check one reply stream per call. If it has expired unread, its bytes are no longer counted.
local client = redis.call('HRANDFIELD', KEY.unread)
if client and redis.call('EXISTS', KEY.reply .. client) == 0 then nothing_unread(client) end
-- Jobs that wait under a number that `needs` has lost get it again: no worker would look there. The first of each number
-- is looked at.
local NUMBERS = 64
for class = 0, CLASSES - 1 do
  local from = 0
  for _ = 1, NUMBERS do
    local first = redis.call('ZRANGEBYSCORE', later_key(class), SLOTS_FROM + from * SLOT, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if not first[1] then break end
    local number = math.floor((first[2] - SLOTS_FROM) / SLOT)
    local id = id_of(first[1])
    local state, needs, turn, samples, published, least = unpack(redis.call('HMGET', job_key(id),
      JOB.state, JOB.needs, JOB.turn, JOB.samples, JOB.published, JOB.min_version))
    local names = state == 'q' and string.match(needs or '', '^%d+ (.+)$')
    names = names and with_version(names, string.match(least or '', '^=(%d+)$'))
    local slot = names and whole(redis.call('HGET', needs_key, 'slot:' .. names))
    if not names then
      redis.call('ZREM', later_key(class), first[1])
      if state == 'q' then to_queue(id, class, turn, unpublished(samples, published)) end
    elseif slot and slot ~= number then
      redis.call('ZADD', later_key(class), first[2] + (slot - number) * SLOT, first[1])
    else
      if not slot then redis.call('HSET', needs_key, 'slot:' .. names, number) end
      from = number + 1
    end
  end
end
-- A token may be lost with the worker that took it: it is there again whenever jobs wait.
local waiting = redis.call('LLEN', suspects_key)
for class = 0, CLASSES - 1 do
  local queued = redis.call('ZCARD', queue_key(class))
  waiting = waiting + queued
  -- Tenants that would begin there anyway; all of them when no job of the class waits.
  local idle = queued == 0 and redis.call('ZCARD', later_key(class)) == 0
  local turn = idle and '+inf' or counted(redis.call('HGET', load_key, 'turn' .. class))
  redis.call('ZREMRANGEBYSCORE', turns_key(class), '-inf', turn)
end
if waiting == 0 then redis.call('HDEL', load_key, 'queued') end    -- somebody has written into the counter
if requeued + undecided + waiting > 0 then wake() end
local more = (left - expired - undecided <= 0 or bytes >= MAX_BYTES) and 1 or 0
return {requeued, dead, expired, removed, more}
