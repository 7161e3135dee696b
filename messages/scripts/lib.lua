-- This is put before every script, behind lib_jobs.lua: how jobs end, go back and are given up; workers; dead letters.
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
local NEWS = 256               -- about how many notices of new pieces are kept for a client, and for how long
local NEWS_TTL_S = 60

-- Count `bytes` of results on a client's reply stream, negative when the client takes them. HASH `unread` has the sums.
local function count_unread(client, bytes)
  redis.call('HINCRBY', KEY.unread, client, bytes)
  redis.call('HINCRBY', load_key, 'unread', bytes)
end

-- Clear the counter of a client whose reply stream is empty or has expired.
local function nothing_unread(client)
  local left = counted(redis.call('HGET', KEY.unread, client))
  redis.call('HDEL', KEY.unread, client)
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

-- Replace the record of job `id` by a tombstone and remove it from the sets of its owner and its client, and from
-- `deadlines`. The caller updates the counters but `saved`.
local function close_record(id, outcome, owner, client, deadline, saved, digest)
  local key = job_key(id)
  if owner then redis.call('SREM', held_key(owner), id) end
  if client then redis.call('SREM', client_key(client), id) end
  if deadline then redis.call('ZREM', KEY.deadlines, id) end
  if saved then redis.call('HINCRBY', load_key, 'saved', 0 - (whole(saved) or 0)) end
  redis.call('UNLINK', key)   -- its pieces may be thousands of fields
  if digest then
    redis.call('HSET', key, JOB.state, outcome, JOB.digest, digest)
  else
    redis.call('HSET', key, JOB.state, outcome)
  end
  redis.call('EXPIRE', key, remembered_s())
end

-- Put an outcome on a client's reply stream, where it counts for `bytes`.
local function reply_to(client, bytes, ...)
  local reply = KEY.reply .. client
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
  local state, client, attempts, published, samples, owner, nbytes, deadline, group, digest, saved, class, turn, min_version,
    max_staleness, adapter, prefers, needs = unpack(redis.call('HMGET', job_key(id), JOB.state, JOB.client, JOB.attempt,
    JOB.published, JOB.samples, JOB.owner, JOB.nbytes, JOB.deadline, JOB.group, JOB.digest, JOB.saved, JOB.priority, JOB.turn,
    JOB.min_version, JOB.max_staleness, JOB.adapter, JOB.prefers, JOB.needs))
  if state == 'q' then
    attempt(function()
      if redis.call('ZREM', queue_key(class), id) == 1 then
        redis.call('HINCRBY', load_key, 'queued', 0 - unpublished(samples, published))
      end
    end)
  end
  if client then
    attempt(reply_to, client, #cause + #host + #err, ENTRY.job, id, ENTRY.outcome, outcome, ENTRY.cause, cause, ENTRY.host,
            host, ENTRY.error, err, ENTRY.attempts, whole(attempts) or 0, ENTRY.published, whole(published) or 0, ENTRY.group,
            group or id)
  end
  if min_version or max_staleness or adapter or prefers or needs then
    attempt(function() redis.call('ZREM', later_key(class), later_member(id, turn)) end)
  end
  if prefers then redis.call('ZREM', prefers_key, id) end
  close_record(id, outcome, owner, client, deadline, saved, digest)
  -- A client that has nothing more is not behind with what nobody ran. Of several clients of one tenant another may have.
  if client and tenant_of(client) == client and redis.call('EXISTS', client_key(client)) == 0 then
    for class = 0, CLASSES - 1 do redis.call('ZREM', turns_key(class), client) end
  end
  jobs_ended(1, whole(nbytes) or 0, outcome)
end

-- ZSET '<entry id> <bytes>' of dead letters, by the first part of the id. `load` has the sum in `letters`.
local letters_key = KEY.letters
-- Delete a dead letter. Returns 1, or 0 if there is none.
local function drop_letter(id)
  local at = string.match(id, '^(%d+)-') or '0'
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', letters_key, at, at)) do
    if match(entry, '^%S+') == id and redis.call('ZREM', letters_key, entry) == 1 then
      redis.call('HINCRBY', load_key, 'letters', 0 - (whole(match(entry, ' (%d+)$')) or 0))
    end
  end
  return redis.call('XDEL', KEY.dead, id)
end

-- Keep a job that is given up as a dead letter. Older letters make room for it. One that finds no room, or is too large by
-- itself, is kept without its payload; `dropped` says how many bytes that had.
local trimmed = 0
local function dead_letter(id, cause, host, err)
  -- Delete the oldest letters until `bytes` more fit into `room`, TRIMMED of them in a call at most. Returns whether they fit.
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
      redis.call('XDEL', KEY.dead, unpack(ids))
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

  local payload, attempts = unpack(redis.call('HMGET', job_key(id), JOB.payload, JOB.attempt))
  local dropped = 0
  payload = payload or ''
  local room = math.max(math.floor(counted(redis.call('HGET', load_key, 'cap')) / LETTERS_SHARE), LETTERS_LEAST)
  local rest = ENTRY_BYTES + #cause + #host + #err
  if rest + #payload > room or not make_room(rest + #payload, room) then
    payload, dropped = '', #payload
    make_room(rest, room)
  end
  local entry = redis.call('XADD', KEY.dead, 'MAXLEN', '~', DEAD_LETTERS, '*', 'id', id, 'cause', cause, 'host', host,
                           'error', err, 'attempts', attempts or '0', 'at', redis_ms(), 'payload', payload, 'dropped', dropped)
  redis.call('ZADD', letters_key, string.match(entry, '^%d+'), entry .. ' ' .. rest + #payload)
  redis.call('HINCRBY', load_key, 'letters', rest + #payload)
  fail(id, 'dead', cause, host, err)
end

-- End a job whose record, or whose client's reply stream, nobody can use.
local function dead_letter_damaged(id, why)
  dead_letter(id, 'what Redis has of it is damaged', '', why)
end

-- Run `f` for job `id`, one of several of a call. The job ends if what Redis has of it is in the way; then returns nil.
-- Only a script can do this in a claim or a reap, whose callers do not know which jobs it is about. Raises if the job cannot
-- be given up; a worker sends the jobs of a batch one by one then (`each` in worker/lease/batches.py).
local function alone(id, f, ...)
  local fine, answer = attempt(f, ...)
  if fine then return answer end
  dead_letter_damaged(id, answer)
end

-- Cancel job `id` if it is open. Returns the state it was in, false if it is unknown.
local function cancel(id, cause)
  local state = redis.call('HGET', job_key(id), JOB.state)
  if state == 'q' or state == 'r' then fail(id, 'cancelled', cause, '', '') end
  return state
end

-- Tell the workers that these jobs, which may be running, were cancelled.
local function ring_cancelled(ids)
  if #ids > 0 then ring('kind', 'cancel', 'ids', table.concat(ids, ' ')) end
end

-- Jobs stop waiting for a worker that is gone at the next end_preferences. Returns how many.
local function no_longer_preferred(worker)
  local number, found = whole(redis.call('HGET', KEY.worker .. worker, 'number')), 0
  for class = 0, number and CLASSES - 1 or -1 do
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', later_key(class), -number, -number, 'LIMIT', 0, 1024)) do
      redis.call('ZADD', prefers_key, 0, id_of(member))
      found = found + 1
    end
  end
  return found
end

-- A job that was set aside goes into its queue. n, d: its samples, and those that are published.
local function from_later(id, class, turn, n, d)
  if redis.call('ZREM', later_key(class), later_member(id, turn)) == 1 then
    to_queue(id, class, turn, unpublished(n, d))
  end
end

-- Move jobs whose time to wait for a preferred worker is over to their queues, at most `budget`. Returns how many.
local function end_preferences(budget)
  local ids = redis.call('ZRANGEBYSCORE', prefers_key, '-inf', clock().deadlines, 'LIMIT', 0, math.max(budget, 0))
  for _, id in ipairs(ids) do
    local state, class, turn, samples, published = unpack(redis.call('HMGET', job_key(id),
      JOB.state, JOB.priority, JOB.turn, JOB.samples, JOB.published))
    redis.call('ZREM', prefers_key, id)
    if state == 'q' then alone(id, from_later, id, class, turn, samples, published) end
  end
  return #ids
end

-- A running job has no owner any more. Raises for a damaged class, before it writes.
local function disown(id, owner, class)
  queue_key(class)
  redis.call('HDEL', job_key(id), JOB.owner)
  redis.call('HSET', job_key(id), JOB.state, 'q')
  redis.call('SREM', held_key(owner), id)
end

-- Put a running job back into its queue at its turn, without an owner, or among the suspects on its last chance.
local function requeue_or_suspect(id, owner, max_lost)
  local lost, class, turn, samples, published = unpack(redis.call('HMGET', job_key(id),
    JOB.lost, JOB.priority, JOB.turn, JOB.samples, JOB.published))
  lost = tonumber(lost) or 0
  disown(id, owner, class)
  if lost > 0 and lost >= max_lost - 1 then
    redis.call('RPUSH', suspects_key, id)
  else
    to_queue(id, class, turn, unpublished(samples, published))
  end
end

-- Put a job aside for one worker: one with a lease, until then by the pool's clock. Returns whether there is such a worker.
-- It has a number from then on; minus the number is the score in `later`.
local function leave_to(worker, id, class, turn, until_ms)
  if not alive(worker) then return false end
  local key = KEY.worker .. worker
  local number = whole(redis.call('HGET', key, 'number'))
  if not number then
    number = redis.call('HINCRBY', load_key, 'numbers', 1)
    redis.call('HSET', key, 'number', number)
  end
  redis.call('ZADD', later_key(class), -number, later_member(id, turn))
  redis.call('ZADD', prefers_key, until_ms, id)
  wake(worker)
  return true
end

-- The transfer that is forgotten when transfer `number` begins. Each has what every worker said of it.
local TRANSFERS = 1024
local function epoch_before(number) return KEY.epoch .. number - TRANSFERS end

-- A version is committed: some worker serves it, or there is none. A committed version never goes back. Returns whether
-- this call did it. version: <name>@<version> of an adapter. An adapter gets its number in the pool, by which jobs wait for
-- it, with its first committed version.
local function commit(version, epoch, remember_s, digest)
  local weights, key = KEY.weights, KEY.version .. version
  local first = redis.call('HGET', key, 'st') ~= 'committed'
  if first then redis.call('HSET', key, 'st', 'committed', 'epoch', epoch, 'closed', redis_ms()) end
  redis.call('EXPIRE', key, remember_s)
  local adapter, number = string.match(version, '^(.+)@(%d+)$')
  local newest = adapter and 'adapter:' .. adapter or 'committed'
  if tonumber(number or version) <= (whole(redis.call('HGET', weights, newest)) or 0) then return first end
  redis.call('HSET', weights, newest, number or version)
  if not adapter then
    redis.call('HSET', weights, 'digest', digest)
    redis.call('UNLINK', KEY.holders)
  elseif not redis.call('HGET', weights, 'number:' .. adapter) then
    redis.call('HSET', weights, 'number:' .. adapter, redis.call('HINCRBY', weights, 'adapters', 1))
  end
  return first
end

-- A worker has joined or left. Whoever keeps a list of workers sees by `roster` that it is old.
local function roster_changed()
  redis.call('HINCRBY', load_key, 'roster', 1)
end

-- Remove a worker that holds no job from the pool. Returns how many jobs waited for it.
local function forget_worker(worker)
  local leaves = redis.call('ZREM', KEY.workers, worker) == 1
  local waited = no_longer_preferred(worker)
  redis.call('DEL', KEY.worker .. worker)
  redis.call('HDEL', takers_key, worker)
  redis.call('HDEL', KEY.holders, worker)
  if leaves then roster_changed() end
  return waited
end

-- Whether `worker` holds job `id` in this attempt.
local function owns(id, worker, attempt)
  local state, owner, its_attempt = unpack(redis.call('HMGET', job_key(id), JOB.state, JOB.owner, JOB.attempt))
  return state == 'r' and owner == worker and its_attempt == attempt
end

-- End jobs that are past their deadline, at most `budget`. The worker stops a running one. If it has not done so after a
-- second, no worker will, and the job ends here. Returns how many were ended.
local function end_overdue(budget)
  local expired, running, now = 0, {}, clock().deadlines
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEY.deadlines, '-inf', now, 'LIMIT', 0, math.max(budget, 0))) do
    local state, deadline = unpack(redis.call('HMGET', job_key(id), JOB.state, JOB.deadline))
    if not whole(deadline) or (state ~= 'q' and state ~= 'r') then
      redis.call('ZREM', KEY.deadlines, id)
    elseif state == 'q' or whole(deadline) + 1000 <= now then
      fail(id, 'expired', state == 'q' and 'its deadline passed in the queue' or 'its deadline passed while it was running',
           '', '')
      if state == 'r' then running[#running + 1] = id end
      expired = expired + 1
    end
  end
  ring_cancelled(running)
  return expired
end
