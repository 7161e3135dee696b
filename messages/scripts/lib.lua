-- This is put before every script. The first ARGV is always the pool's key prefix. KEYS[1] is the pool's `load` hash,
-- which routes the script on a cluster. Every other key has the same hash tag.
--
-- A job's record, HASH <prefix>job:<id>:
--   st  state: q queued, r running; after the end, with a TTL: done, cancelled, expired, dead
--   p payload   n samples   q priority class   y client id   z payload bytes   t accepted (ms)   e deadline (ms)
--   v min_version   g max_staleness   l adapter, <name>@<least version>   G group id, where one was given   w owner
--   P worker it prefers, <ms>@<worker id>: no other worker takes it for so many ms after its acceptance
--   c lost leases   x the next worker only ends it, with the tokens that it has, see stop
--   a attempt, the fencing token: +1 with every claim   d samples published   s<i> sample i is published
--   k<i>, k<i>.1, k<i>.2, … the saved pieces of unfinished sample i, in order   kk there is such a field
local prefix = ARGV[1]
local load_key = KEYS[1]
local LAST_ID = '18446744073709551615-18446744073709551615'
local ASIDE_TTL_S = 86400      -- how long a key is kept that was set aside
local ASIDE_ENTRIES = 1024
local TOMBSTONE_S = 3600       -- how long an id is remembered after its job ended
local DEAD_LETTERS = 10000     -- the newest are kept; their clients have the outcome in any case
local REPLY_TTL_S = 604800     -- an absent client's results are kept a week after the last one
local ENTRY_BYTES = 64         -- bytes that an entry of a reply stream counts for beside its content
local CLASSES = 3              -- the number of priorities
local NEWS = 256               -- about how many notices of new pieces are kept for a client, and for how long
local NEWS_TTL_S = 60

local server = redis

-- Make `key` usable again for a command that was refused because of what somebody had put there. A key of a wrong type
-- is renamed to aside:<name>, and counts as empty from then on. So is a stream with the highest id there is, to which
-- nothing can be added; its entries, up to ASIDE_ENTRIES, are put into a new one. A counter begins at 0.
local function mend(why, command, key, field)
  local wrong_type, full = string.find(why, 'WRONGTYPE', 1, true), string.find(why, 'exhausted', 1, true)
  if command == 'HINCRBY' and not wrong_type then server.call('HDEL', key, field) end
  local aside = prefix .. 'aside:' .. string.sub(key, #prefix + 1)
  if not (wrong_type or full) or server.pcall('RENAME', key, aside).err then return end
  server.call('EXPIRE', aside, ASIDE_TTL_S)
  server.pcall('HINCRBY', load_key, 'aside', 1)
  for _, entry in ipairs(full and server.call('XRANGE', aside, '-', '(' .. LAST_ID, 'COUNT', ASIDE_ENTRIES) or {}) do
    server.pcall('XADD', key, entry[1], unpack(entry[2]))
  end
end

-- What one party has put into Redis stops nobody else: a command that meets it is given a second time, see mend.
local redis = {pcall = server.pcall, call = function(...)
  local answer = server.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  mend(answer.err, ...)
  return server.call(...)
end}

-- Run `f`. Returns true and its answer, or false and why one party's data is in its way. Raises what Redis refuses for
-- reasons of its own (memory, disk, permissions): that is not about this entry.
local function attempt(f, ...)
  local fine, answer = pcall(f, ...)
  if fine then return true, answer end
  local why = type(answer) == 'table' and answer.err or tostring(answer)
  for _, cause in ipairs({'WRONGTYPE', 'exhausted', 'not an integer', 'overflow', 'attempt to ', 'bad argument', 'must be'}) do
    if string.find(why, cause, 1, true) then return false, why end
  end
  error(answer, 0)
end

-- A number as all numbers of a record are written, or nil: digits, few enough for Lua to be exact.
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text) or nil
end

-- What a counter says; 0 if it says no whole number.
local function counted(text)
  local number = tonumber(text) or 0
  return number % 1 == 0 and math.abs(number) < 1e15 and number or 0
end

-- Redis' own clock. For people, and for what nobody watched: it may be stepped, and is another host's after a failover.
local function redis_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The pool's clock, HASH <prefix>clock, in ms. It neither steps nor jumps: only a witness moves it, who has counted by
-- its own monotonic clock since it last heard of it. Redis' clock bounds that, so a witness that is too fast does no harm.
-- One that is too slow does none either, as long as there is another: the clock is where the furthest witness says.
--   at     what was witnessed, beginning with Redis' time. Leases follow it.
--   seen   Redis' time at that moment. A step back moves it; so does a step forward that a witness contradicts.
--   slept  what passed while nobody was there to watch, as Redis' clock told it. Deadlines follow at + slept.
--   until  the last lease ends then
--   gap    what Redis' clock says has passed before somebody came who had not been there, though others may have been:
--          it is slept if one of these saw it pass (they heard of `at` up to gap_at), or if none of their leases, up to
--          gap_end, is left; and it never was if one of them comes and did not see it.
local clock_key = prefix .. 'clock'
local UNWITNESSED_MS = 2000    -- so much is believed of Redis' clock without a witness
local STEP_MS = 15000          -- longer than the oldest copy of a call that may arrive: a difference beyond is a step

local the_clock
local function clock()
  if not the_clock then
    local c = redis.call('HMGET', clock_key, 'at', 'slept', 'seen')
    local at, slept, seen, redis_now = whole(c[1]), whole(c[2]) or 0, whole(c[3]), redis_ms()
    local since = at and seen and math.max(0, math.min(redis_now - seen, 1000)) or 0
    -- leases, deadlines: what is certain to have passed. now: with what has probably passed since then, 1 s at most.
    the_clock = at and {leases = at, deadlines = at + slept, now = at + slept + since}
      or {leases = 0, deadlines = 0, now = redis_now}
  end
  return the_clock
end

-- Move the clock on. heard, passed: what the caller last heard of `at`, nil if nothing, and the ms since then.
local function tick(heard, passed)
  local c = redis.call('HMGET', clock_key, 'at', 'seen', 'slept', 'gap', 'gap_at', 'gap_end', 'until')
  local redis_now, witnessed = redis_ms(), heard and passed and heard + passed
  local at, seen, slept, gap = whole(c[1]) or witnessed or redis_now, whole(c[2]) or redis_now, whole(c[3]) or 0, whole(c[4]) or 0
  local gap_at, gap_end = whole(c[5]) or 0, whole(c[6]) or 0
  if redis_now < seen then seen = redis_now end
  local beat = redis_now - seen
  if gap > 0 and (not witnessed or heard > gap_at) then
    if at >= gap_end then slept, gap = slept + gap, 0 end
  elseif gap > 0 then
    slept, gap = slept + math.min(gap, math.max(0, witnessed - at - beat)), 0
  end
  if witnessed then
    local on = math.max(0, math.min(beat, witnessed - at))
    at, seen = at + on, seen + on
    if on > 0 and beat - on > STEP_MS then seen = redis_now end
  elseif beat <= UNWITNESSED_MS then
    at, seen = at + beat, redis_now
  else
    -- 1 ms later, to tell who heard of the clock before the gap from who hears of it from now on.
    gap, gap_at, gap_end, at, seen = gap + beat, at, whole(c[7]) or 0, at + 1, redis_now
    if at > gap_end then slept, gap = slept + gap, 0 end
  end
  redis.call('HSET', clock_key, 'at', at, 'seen', seen, 'slept', slept, 'gap', gap, 'gap_at', gap_at, 'gap_end', gap_end)
  the_clock = nil
  return at
end

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

-- Replace the record of job `id` by a tombstone and remove it from every index. The caller updates the counters.
-- f: fields by name.
local function bury_record(id, outcome, owner, f)
  local key = job_key(id)
  if owner then redis.call('SREM', held_key(owner), id) end
  if f.y then
    redis.call('SREM', client_key(f.y), id)
  end
  if f.e then redis.call('ZREM', prefix .. 'deadlines', id) end
  if f.v or f.g or f.l or f.P then
    attempt(function() redis.call('ZREM', later_key(f.q), id) end)
  end
  if f.P then redis.call('ZREM', prefers_key, id) end
  redis.call('DEL', key)
  redis.call('HSET', key, 'st', outcome)
  redis.call('EXPIRE', key, TOMBSTONE_S)
end

-- Put an outcome on a client's reply stream, where it counts for `bytes`.
local function reply_to(client, bytes, ...)
  local reply = prefix .. 'reply:' .. client
  redis.call('XADD', reply, '*', ...)
  redis.call('EXPIRE', reply, REPLY_TTL_S)
  count_unread(client, ENTRY_BYTES + bytes)
end

-- End job `id` with an outcome other than "done", and tell the client on its reply stream. Ends a job with a damaged
-- record too; the client is told if the record says who it is and its reply stream can be written.
local function fail(id, outcome, cause, host, err)
  local r = redis.call('HMGET', job_key(id), 'y', 'a', 'd', 'w', 'st', 'z', 'e', 'q', 'v', 'g', 'G', 'l', 'P')
  if r[1] then
    attempt(reply_to, r[1], #cause + #host + #err, 'j', id, 'o', outcome, 'c', cause, 'h', host, 'e', err,
            'a', r[2] or '0', 'd', r[3] or '0', 'G', r[11] or id)
  end
  bury_record(id, outcome, r[4] or nil,
              {y = r[1], e = r[7], q = r[8], v = r[9], g = r[10], l = r[12], P = r[13]})
  redis.call('HINCRBY', load_key, 'jobs', -1)
  redis.call('HINCRBY', load_key, 'bytes', -(whole(r[6]) or 0))
  redis.call('HINCRBY', load_key, outcome, 1)
end

local function dead_letter(id, cause, host, err)
  local f = redis.call('HMGET', job_key(id), 'p', 'a')
  redis.call('XADD', prefix .. 'dead', 'MAXLEN', '~', DEAD_LETTERS, '*', 'id', id, 'cause', cause, 'host', host, 'error', err,
             'attempts', f[2] or '0', 'at', redis_ms(), 'payload', f[1] or '')
  fail(id, 'dead', cause, host, err)
end

-- End a job whose record, or whose client's reply stream, nobody can use.
local function give_up(id, why)
  dead_letter(id, 'what Redis has of it is damaged', '', why)
end

-- Run `f` for job `id`, one of several of a call. The job ends if what Redis has of it is in the way; then returns nil.
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

-- The field of a job's record that holds piece `number` of a sample.
local function piece_field(sample, number)
  return tonumber(number) == 0 and 'k' .. sample or 'k' .. sample .. '.' .. number
end

local function drop_pieces_from(key, sample, piece)
  while redis.call('HDEL', key, 'k' .. sample .. '.' .. piece) == 1 do piece = piece + 1 end
end

local function drop_partials(key, sample)
  if redis.call('HDEL', key, 'k' .. sample) == 1 then drop_pieces_from(key, sample, 1) end
end

-- Save the next piece of an unfinished sample; it takes the place of itself and all later ones, so piece 0 starts the
-- sample over. Within an attempt a worker starts over only to save the same tokens again, so a delayed copy of a piece
-- either fits or does not begin where the one before it ends, which the next worker looks at. Returns ok, or gap if its
-- forerunner is missing (a delayed copy of an earlier piece took it away): it is not kept, whoever sent it starts over.
local function save_partial(key, sample, piece, bytes)
  if redis.call('HEXISTS', key, 's' .. sample) == 1 then return 'ok' end
  local number = tonumber(piece)
  if number > 0 and redis.call('HEXISTS', key, piece_field(sample, number - 1)) == 0 then return 'gap' end
  -- Written before anything is deleted: a Redis at its memory limit refuses a script only at its first write.
  redis.call('HSET', key, piece_field(sample, number), bytes, 'kk', 1)
  drop_pieces_from(key, sample, number + 1)
  return 'ok'
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

-- Remove a worker that holds no job from the pool. Its wants are left, see forget_wants. Returns how many jobs waited
-- for it.
local function forget_worker(worker)
  redis.call('ZREM', prefix .. 'workers', worker)
  local waited = no_longer_preferred(worker)
  redis.call('DEL', prefix .. 'worker:' .. worker)
  ring('kind', 'worker', 'id', worker)
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
