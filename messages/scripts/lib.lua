-- This is put before every script, behind lib_base.lua and before lib_pieces.lua: what they share about jobs, workers and
-- dead letters.
--
-- A job's record, HASH <prefix>job:<id>:
--   st  state: q queued, r running; after the end, with a TTL: done, cancelled, expired, dead
--   p payload   n samples   q priority class   y client id   z payload bytes   t accepted (ms)   e deadline (ms)
--   v min_version   g max_staleness   l adapter, <name>@<least version>   G group id, where one was given   w owner
--   N what it needs of an engine, '<tokens of context> <name> <name> …'; a plain job has none
--   P worker it prefers, <ms>@<worker id>: no other worker takes it for so many ms after its acceptance
--   c lost leases   x the next worker only ends it, with the tokens that it has, see stop   h digest of its content
--   a attempt, the fencing token: +1 with every claim   d samples published   s<i> sample i is published
--   k<i>, k<i>.1, k<i>.2, … the saved pieces of unfinished sample i, in order   kk bytes of these fields, once one was saved
-- Of an ended job st and h are left.
local TOMBSTONE_S = 3600       -- how long an id is remembered after its job ended
local TOMBSTONE_LEAST_S = 60   -- and how long if more jobs ended in the same hour than may be remembered:
local TOMBSTONE_BYTES = 256    -- about so many bytes each take
local TOMBSTONES_SHARE = 4     -- this part of the pool's bytes, as the last submission said them;
local TOMBSTONES_LEAST = 65536 -- but so many at least
local DEAD_LETTERS = 10000     -- the newest are kept; their clients have the outcome in any case
local LETTERS_SHARE = 4        -- and only those that fit into this part of the pool's bytes, as the last submission
local LETTERS_LEAST = 1048576  -- said them; but into so many bytes at least
local TRIMMED = 2048           -- letters that one call pushes out at most, so many at a time:
local TRIMMED_AT_ONCE = 64
local REPLY_TTL_S = 604800     -- an absent client's results are kept a week after the last one
local ENTRY_BYTES = 64         -- bytes that an entry of a reply stream counts for beside its content
local CLASSES = 3              -- the number of priorities
local NEWS = 256               -- about how many notices of new pieces are kept for a client, and for how long
local NEWS_TTL_S = 60


-- The first of these fields of an open job's record that is not what enqueue writes, or nil. Each claimed job comes
-- here, and a table of the fields made a claim a quarter slower. p: anything but false if there is a payload.
local function damaged(p, a, t, e, d, n, y, q)
  return not p and 'p' or not whole(a) and 'a' or not whole(t) and 't' or e and not whole(e) and 'e'
    or not whole(d) and 'd' or not whole(n) and 'n' or not y and 'y' or not q and 'q' or nil
end
local DAMAGED = 'field %s of its record is missing or no such thing'

-- The states in which a record is a tombstone.
local ENDED = {done = true, cancelled = true, expired = true, dead = true}

local function job_key(id) return prefix .. 'job:' .. id end
local function held_key(worker) return prefix .. 'held:' .. worker end
-- Raises for what is no class; a record may say anything.
local function key_of_class(name, class)
  local number = tonumber(class)
  if not number or number < 0 or number >= CLASSES then error('a class must be a number below ' .. CLASSES) end
  return prefix .. name .. class
end
local function queue_key(class) return key_of_class('queue:', class) end
-- SET of a client's open jobs.
local function client_key(client) return prefix .. 'client:' .. client end
-- ZSET of jobs that need newer weights, or another adapter, than the workers that looked at them had. The score is the
-- version that a job needs; for an adapter, ADAPTER times its number in the pool is added. A worker may take one range
-- of scores for its weights, and one for each of its adapters. Jobs that prefer a worker wait here for it too, at minus
-- that worker's number. ZSET `prefers` says until when.
local function later_key(class) return key_of_class('later:', class) end
-- Jobs that need what only some engines can do wait there, too, at NEEDS + SLOT * <number of its names> + <tokens of context>.
-- HASH `needs` has these numbers, and what workers can do; see claim.
local NEEDS, SLOT = 4503599627370496, 4294967296   -- 2^52, above all adapters; 2^32, above all lengths of a context
local needs_key = prefix .. 'needs'
-- LIST of jobs on their last chance. Each runs alone on its worker. If it kills engines, no other job is lost with it.
-- If another job does, this one is not lost.
local suspects_key = prefix .. 'suspects'
local prefers_key = prefix .. 'prefers'

-- A worker that blocks on `wake` gets the token, claims, and passes the token on while work is left. Each worker also
-- has a token of its own, `token:<id>`, for jobs that only it will take.
local function wake(worker)
  local key = prefix .. (worker and 'token:' .. worker or 'wake')
  if redis.call('LLEN', key) == 0 then
    redis.call('LPUSH', key, '1')
    redis.call('EXPIRE', key, 60)
  end
end

local function append(list, ...)
  for _, value in ipairs({...}) do list[#list + 1] = value end
end

-- Whether this worker holds a lease.
local function alive(worker)
  local lease = redis.call('ZSCORE', prefix .. 'workers', worker)
  return lease and tonumber(lease) > clock().leases
end

-- For a worker whose lease is not there. It holds nothing then; if it does, somebody deleted the leases. With a lease that
-- is over, the next reap takes its jobs back.
local function leave_to_others(worker)
  if redis.call('SCARD', held_key(worker)) > 0 then redis.call('ZADD', prefix .. 'workers', 'NX', 0, worker) end
end

local function ring(...)
  redis.call('XADD', prefix .. 'bell', 'MAXLEN', '~', 512, '*', ...)
end

-- Count `bytes` of results on a client's reply stream, negative when the client takes them. HASH `unread` has the sums.
local function count_unread(client, bytes)
  redis.call('HINCRBY', prefix .. 'unread', client, bytes)
  redis.call('HINCRBY', load_key, 'unread', bytes)
end

-- Clear the counter of a client whose reply stream is empty or has expired.
local function nothing_unread(client)
  local left = counted(redis.call('HGET', prefix .. 'unread', client))
  redis.call('HDEL', prefix .. 'unread', client)
  if left ~= 0 then redis.call('HINCRBY', load_key, 'unread', -left) end
end

-- Seconds for which the ids of jobs that end now are remembered. `load` has when this hour began, and how many jobs had
-- ended by then.
local tombstone_s
local function remembered_s()
  if not tombstone_s then
    local f = redis.call('HMGET', load_key, 'accepted', 'jobs', 'cap', 'hour')
    local ended, now = counted(f[1]) - counted(f[2]), math.floor(redis_ms() / 1000)
    local since, before = string.match(f[4] or '', '^(%d+)@(%d+)$')
    since, before = whole(since), whole(before)
    if not since or not before or now < since or now - since >= TOMBSTONE_S or ended < before then
      redis.call('HSET', load_key, 'hour', string.format('%d@%d', now, math.max(0, ended)))
      before = ended
    end
    local most = math.max(counted(f[3]) / TOMBSTONES_SHARE / TOMBSTONE_BYTES, TOMBSTONES_LEAST)
    tombstone_s = ended - before < most and TOMBSTONE_S or TOMBSTONE_LEAST_S
  end
  return tombstone_s
end

-- Replace the record of job `id` by a tombstone and remove it from every index. The caller updates the counters but
-- `saved`. f: fields by name.
local function bury_record(id, outcome, owner, f)
  local key = job_key(id)
  if owner then redis.call('SREM', held_key(owner), id) end
  if f.y then
    redis.call('SREM', client_key(f.y), id)
  end
  if f.e then redis.call('ZREM', prefix .. 'deadlines', id) end
  if f.v or f.g or f.l or f.P or f.N then
    attempt(function() redis.call('ZREM', later_key(f.q), id) end)
  end
  if f.P then redis.call('ZREM', prefers_key, id) end
  if f.kk then redis.call('HINCRBY', load_key, 'saved', 0 - (whole(f.kk) or 0)) end
  redis.call('UNLINK', key)   -- its pieces may be thousands of fields
  if f.h then redis.call('HSET', key, 'st', outcome, 'h', f.h) else redis.call('HSET', key, 'st', outcome) end
  redis.call('EXPIRE', key, remembered_s())
end

-- Put an outcome on a client's reply stream, where it counts for `bytes`.
local function reply_to(client, bytes, ...)
  local reply = prefix .. 'reply:' .. client
  redis.call('XADD', reply, '*', ...)
  redis.call('EXPIRE', reply, REPLY_TTL_S)
  count_unread(client, ENTRY_BYTES + bytes)
end

-- Count jobs that ended, with the bytes of their payloads. With the last open job every payload and every saved piece is
-- gone, whatever somebody has written into a record.
local function jobs_ended(jobs, bytes, outcome)
  if redis.call('HINCRBY', load_key, 'jobs', 0 - jobs) == 0 then
    redis.call('HSET', load_key, 'bytes', 0)
    redis.call('HDEL', load_key, 'saved')
  else
    redis.call('HINCRBY', load_key, 'bytes', 0 - bytes)
  end
  redis.call('HINCRBY', load_key, outcome, jobs)
end

-- End job `id` with an outcome other than "done", and tell the client on its reply stream. Ends a job with a damaged
-- record too; the client is told if the record says who it is and its reply stream can be written.
local function fail(id, outcome, cause, host, err)
  local r = redis.call('HMGET', job_key(id), 'y', 'a', 'd', 'w', 'st', 'z', 'e', 'q', 'v', 'g', 'G', 'l', 'P', 'h',
                       'kk', 'N')
  if r[1] then
    attempt(reply_to, r[1], #cause + #host + #err, 'j', id, 'o', outcome, 'c', cause, 'h', host, 'e', err,
            'a', whole(r[2]) or 0, 'd', whole(r[3]) or 0, 'G', r[11] or id)
  end
  bury_record(id, outcome, r[4] or nil,
              {y = r[1], e = r[7], q = r[8], v = r[9], g = r[10], l = r[12], P = r[13], h = r[14], kk = r[15], N = r[16]})
  jobs_ended(1, whole(r[6]) or 0, outcome)
end

-- ZSET '<entry id> <bytes>' of dead letters, by the first part of the id. `load` has the sum in `letters`.
local letters_key = prefix .. 'letters'
-- Delete a dead letter. Returns 1, or 0 if there is none.
local function drop_letter(id)
  local at = string.match(id, '^(%d+)-') or '0'
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', letters_key, at, at)) do
    if match(entry, '^%S+') == id and redis.call('ZREM', letters_key, entry) == 1 then
      redis.call('HINCRBY', load_key, 'letters', 0 - (whole(match(entry, ' (%d+)$')) or 0))
    end
  end
  return redis.call('XDEL', prefix .. 'dead', id)
end

-- Delete the oldest letters until `bytes` more fit into `room`, TRIMMED of them in a call at most. Returns whether they fit.
local trimmed = 0
local function make_room(bytes, room)
  local kept, number = counted(redis.call('HGET', load_key, 'letters')), redis.call('ZCARD', letters_key)
  while (kept + bytes > room or number >= DEAD_LETTERS) and number > 0 and trimmed < TRIMMED do
    local entries, ids, freed = {}, {}, 0
    for _, entry in ipairs(redis.call('ZRANGEBYSCORE', letters_key, '-inf', '+inf', 'LIMIT', 0, TRIMMED_AT_ONCE)) do
      if kept + bytes - freed <= room and number - #entries < DEAD_LETTERS then break end
      append(entries, entry)
      append(ids, match(entry, '^%d+%-%d+') or '0-0')
      freed = freed + (whole(match(entry, ' (%d+)$')) or 0)
    end
    redis.call('ZREM', letters_key, unpack(entries))
    redis.call('XDEL', prefix .. 'dead', unpack(ids))
    redis.call('HINCRBY', load_key, 'letters', -freed)
    redis.call('HINCRBY', load_key, 'trimmed', #entries)
    kept, number, trimmed = kept - freed, number - #entries, trimmed + #entries
  end
  if number == 0 and kept ~= 0 then   -- somebody has written into the counter
    redis.call('HSET', load_key, 'letters', 0)
    kept = 0
  end
  return kept + bytes <= room
end

-- Keep a job that is given up as a dead letter. Older letters make room for it. One that finds no room, or is too large by
-- itself, is kept without its payload; `dropped` says how many bytes that had.
local function dead_letter(id, cause, host, err)
  local f = redis.call('HMGET', job_key(id), 'p', 'a')
  local payload, dropped = f[1] or '', 0
  local room = math.max(math.floor(counted(redis.call('HGET', load_key, 'cap')) / LETTERS_SHARE), LETTERS_LEAST)
  local rest = ENTRY_BYTES + #cause + #host + #err
  if rest + #payload > room or not make_room(rest + #payload, room) then
    payload, dropped = '', #payload
    make_room(rest, room)
  end
  local entry = redis.call('XADD', prefix .. 'dead', 'MAXLEN', '~', DEAD_LETTERS, '*', 'id', id, 'cause', cause, 'host', host,
                           'error', err, 'attempts', f[2] or '0', 'at', redis_ms(), 'payload', payload, 'dropped', dropped)
  redis.call('ZADD', letters_key, string.match(entry, '^%d+'), entry .. ' ' .. rest + #payload)
  redis.call('HINCRBY', load_key, 'letters', rest + #payload)
  fail(id, 'dead', cause, host, err)
end

-- End a job whose record, or whose client's reply stream, nobody can use.
local function give_up(id, why)
  dead_letter(id, 'what Redis has of it is damaged', '', why)
end

-- Run `f` for job `id`, one of several of a call. The job ends if what Redis has of it is in the way; then returns nil.
-- Only a script can do this in a claim or a reap, whose callers do not know which jobs it is about. Raises if the job cannot
-- be given up; a worker sends the jobs of a batch one by one then (`each` in worker/lease/batches.py).
local function alone(id, f, ...)
  local fine, answer = attempt(f, ...)
  if fine then return answer end
  give_up(id, answer)
end

-- Cancel job `id` if it is open. Returns the state it was in, false if it is unknown.
local function cancel(id, cause)
  local state = redis.call('HGET', job_key(id), 'st')
  if state == 'q' or state == 'r' then fail(id, 'cancelled', cause, '', '') end
  return state
end

-- Tell the workers that these jobs, which may be running, were cancelled.
local function ring_cancelled(ids)
  if #ids > 0 then ring('kind', 'cancel', 'ids', table.concat(ids, ' ')) end
end

-- Jobs stop waiting for a worker that is gone at the next end_preferences. Returns how many.
local function no_longer_preferred(worker)
  local number, found = whole(redis.call('HGET', prefix .. 'worker:' .. worker, 'number')), 0
  for class = 0, number and CLASSES - 1 or -1 do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', later_key(class), -number, -number, 'LIMIT', 0, 1024)) do
      redis.call('ZADD', prefers_key, 0, id)
      found = found + 1
    end
  end
  return found
end

-- Move jobs whose time to wait for a preferred worker is over to the front of their queues, at most `budget`. Returns
-- how many.
local function end_preferences(budget)
  local ids = redis.call('ZRANGEBYSCORE', prefers_key, '-inf', clock().deadlines, 'LIMIT', 0, math.max(budget, 0))
  for i = #ids, 1, -1 do
    local id = ids[i]
    local f = redis.call('HMGET', job_key(id), 'st', 'q')
    redis.call('ZREM', prefers_key, id)
    if f[1] == 'q' then
      alone(id, function()
        if redis.call('ZREM', later_key(f[2]), id) == 1 then redis.call('LPUSH', queue_key(f[2]), id) end
      end)
    end
  end
  return #ids
end

-- Put a running job back at the front of its queue, without an owner, or among the suspects on its last chance.
local function requeue(id, owner, max_lost)
  local key = job_key(id)
  local f = redis.call('HMGET', key, 'c', 'q')
  local lost, queue = tonumber(f[1]) or 0, queue_key(f[2])
  redis.call('HDEL', key, 'w')
  redis.call('HSET', key, 'st', 'q')
  redis.call('SREM', held_key(owner), id)
  if lost > 0 and lost >= max_lost - 1 then
    redis.call('RPUSH', suspects_key, id)
  else
    redis.call('LPUSH', queue, id)
  end
end

-- The field of the hash `wanted` with which a worker asks for weights or for an adapter. Names contain no '@'.
local function want_field(worker, adapter)
  return (adapter or '') ~= '' and adapter .. '@' .. worker or worker
end

-- The transfer that is forgotten when transfer `number` begins. Each has what every worker said of it.
local TRANSFERS = 1024
local function epoch_before(number) return prefix .. 'epoch:' .. number - TRANSFERS end

-- A worker has joined or left. Whoever keeps a list of workers sees by `roster` that it is old. Only the sender of an open
-- transfer waits for it: a ring wakes every worker, and a thousand that join at once would wake a million.
local function roster_changed(worker)
  redis.call('HINCRBY', load_key, 'roster', 1)
  if (redis.call('HGET', prefix .. 'weights', 'open') or '0') ~= '0' then ring('kind', 'worker', 'id', worker) end
end

-- Remove a worker that holds no job from the pool. Its wants are left, see forget_wants. Returns how many jobs waited
-- for it.
local function forget_worker(worker)
  local leaves = redis.call('ZREM', prefix .. 'workers', worker) == 1
  local waited = no_longer_preferred(worker)
  redis.call('DEL', prefix .. 'worker:' .. worker)
  if leaves then roster_changed(worker) end
  return waited
end

-- Delete all requests of workers that are gone. gone: id -> true.
local function forget_wants(gone)
  local key = prefix .. 'wanted'
  local wanted = redis.call('HGETALL', key)
  for i = 1, #wanted, 2 do
    if gone[string.match(wanted[i], '@(.*)$') or wanted[i]] then redis.call('HDEL', key, wanted[i]) end
  end
end

-- Whether `worker` holds job `id` in this attempt.
local function owns(id, worker, attempt)
  local f = redis.call('HMGET', job_key(id), 'st', 'w', 'a')
  return f[1] == 'r' and f[2] == worker and f[3] == attempt
end

-- End jobs that are past their deadline, at most `budget`. The worker stops a running one. If it has not done so after a
-- second, no worker will, and the job ends here. Returns how many were ended.
local function end_overdue(budget)
  local expired, running, now = 0, {}, clock().deadlines
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now, 'LIMIT', 0, math.max(budget, 0))) do
    local f = redis.call('HMGET', job_key(id), 'st', 'e')
    if not whole(f[2]) or (f[1] ~= 'q' and f[1] ~= 'r') then
      redis.call('ZREM', prefix .. 'deadlines', id)
    elseif f[1] == 'q' or whole(f[2]) + 1000 <= now then
      fail(id, 'expired', f[1] == 'q' and 'its deadline passed in the queue' or 'its deadline passed while it was running',
           '', '')
      if f[1] == 'r' then running[#running + 1] = id end
      expired = expired + 1
    end
  end
  ring_cancelled(running)
  return expired
end
