-- Put before every script. The first ARGV is always the pool's key prefix, and KEYS[1] the pool's `load` hash, which
-- routes the script on a cluster; every other key has the same hash tag.
--
-- A job's record, HASH <prefix>job:<id>:
--   st  state: q queued, r running; then, with a TTL, what became of it: done, cancelled, expired, dead
--   p payload   n samples   q priority class   y client id   z payload bytes   t accepted (ms)   e deadline (ms)
--   v min_version   g max_staleness   w owner   a attempt, the fencing token: +1 with every claim   c lost leases
--   d samples published   s<i> sample i is published   k<i> partial of sample i
local prefix = ARGV[1]
local load_key = KEYS[1]
local TOMBSTONE_S = 3600       -- how long an id is remembered after its job ended
local DEAD_LETTERS = 10000     -- the newest are kept; their clients were told in any case
local REPLY_TTL_S = 604800     -- an absent client's results are kept a week after the last one

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function job_key(id) return prefix .. 'job:' .. id end
local function held_key(worker) return prefix .. 'held:' .. worker end
local function queue_key(class) return prefix .. 'queue:' .. class end
-- ZSET of jobs that need newer weights than those who looked at them had; score: the version they need.
local function later_key(class) return prefix .. 'later:' .. class end
-- LIST of jobs on their last chance. Each runs alone on its worker, so that it takes no neighbour along if it is the
-- one that kills engines, and is not taken along if it is not.
local suspects_key = prefix .. 'suspects'

-- Whoever blocks on `wake` gets the token, claims, and passes it on while work is left.
local function wake()
  local key = prefix .. 'wake'
  if redis.call('LLEN', key) == 0 then
    redis.call('LPUSH', key, '1')
    redis.call('EXPIRE', key, 60)
  end
end

local function ring(...)
  redis.call('XADD', prefix .. 'bell', 'MAXLEN', '~', 512, '*', ...)
end

-- Job `id` reaches `outcome`: out of every index, its record shrinks to a tombstone.
local function finish(id, outcome, owner)
  local key = job_key(id)
  local f = redis.call('HMGET', key, 'z', 'e', 'q', 'v', 'g')
  if owner then redis.call('SREM', held_key(owner), id) end
  if f[2] then redis.call('ZREM', prefix .. 'deadlines', id) end
  if f[4] or f[5] then redis.call('ZREM', later_key(f[3]), id) end
  redis.call('DEL', key)
  redis.call('HSET', key, 'st', outcome)
  redis.call('EXPIRE', key, TOMBSTONE_S)
  redis.call('HINCRBY', load_key, 'jobs', -1)
  redis.call('HINCRBY', load_key, 'bytes', -(tonumber(f[1]) or 0))
  redis.call('HINCRBY', load_key, outcome, 1)
end

-- The same for an outcome that is not "done": the client is told on its reply stream.
local function fail(id, outcome, cause, host, err)
  local f = redis.call('HMGET', job_key(id), 'y', 'a', 'd', 'w', 'st')
  local reply = prefix .. 'reply:' .. f[1]
  redis.call('XADD', reply, '*', 'j', id, 'o', outcome, 'c', cause, 'h', host, 'e', err,
             'a', f[2] or '0', 'd', f[3] or '0')
  redis.call('EXPIRE', reply, REPLY_TTL_S)
  finish(id, outcome, f[5] == 'r' and f[4] or nil)
end

local function dead_letter(id, cause, host, err)
  local f = redis.call('HMGET', job_key(id), 'p', 'a')
  redis.call('XADD', prefix .. 'dead', 'MAXLEN', '~', DEAD_LETTERS, '*', 'id', id, 'cause', cause, 'host', host, 'error', err,
             'attempts', f[2] or '0', 'at', now_ms(), 'payload', f[1])
  fail(id, 'dead', cause, host, err)
end

-- A running job goes back to the front of its queue, without an owner; on its last chance to the suspects.
local function requeue(id, owner, max_lost)
  local key = job_key(id)
  local lost = tonumber(redis.call('HGET', key, 'c')) or 0
  redis.call('HDEL', key, 'w')
  redis.call('HSET', key, 'st', 'q')
  redis.call('SREM', held_key(owner), id)
  if lost > 0 and lost >= max_lost - 1 then
    redis.call('RPUSH', suspects_key, id)
  else
    redis.call('LPUSH', queue_key(redis.call('HGET', key, 'q')), id)
  end
end

-- Whether `worker` holds job `id` in this very attempt.
local function owns(id, worker, attempt)
  local f = redis.call('HMGET', job_key(id), 'st', 'w', 'a')
  return f[1] == 'r' and f[2] == worker and f[3] == attempt
end

-- End what is past its deadline, at most `budget` jobs. A running one is its worker's to stop; when a second has passed
-- nobody is left to do it. Returns how many were ended.
local function end_overdue(now, budget)
  local expired = 0
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now, 'LIMIT', 0, math.max(budget, 0))) do
    local f = redis.call('HMGET', job_key(id), 'st', 'e')
    if not f[2] then
      redis.call('ZREM', prefix .. 'deadlines', id)
    elseif f[1] == 'q' or tonumber(f[2]) + 1000 <= now then
      fail(id, 'expired', f[1] == 'q' and 'its deadline passed in the queue' or 'its deadline passed while it was running',
           '', '')
      if f[1] == 'r' then ring('kind', 'cancel', 'id', id) end
      expired = expired + 1
    end
  end
  return expired
end
