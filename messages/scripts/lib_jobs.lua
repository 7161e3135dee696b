-- This is put before every script, behind lib_base.lua: the records of jobs, the keys where jobs wait, and how workers are woken.
--
-- A job's record, HASH KEY.job .. <id>, has the fields JOB. Both, and all that is written in capitals here and has no
-- value, are in messages/redis/fields.py and keys.py.

-- The first of these fields of an open job's record that is not what enqueue writes, or nil. Each claimed job comes
-- here, and a table of the fields made a claim a quarter slower. payload: anything but false if there is one.
local function damaged(payload, attempt, accepted, deadline, published, samples, client, class)
  return not payload and JOB.payload or not digits(attempt) and JOB.attempt or not digits(accepted) and JOB.accepted
    or deadline and not digits(deadline) and JOB.deadline or not digits(published) and JOB.published
    or not digits(samples) and JOB.samples or not client and JOB.client or not class and JOB.priority or nil
end
-- The same of what a claim reads of a record.
local function damaged_record(f)
  return damaged(f[AT.payload], f[AT.attempt], f[AT.accepted], f[AT.deadline], f[AT.published], f[AT.samples], f[AT.client],
                 f[AT.priority])
end
local DAMAGED = 'field %s of its record is missing or no such thing'

-- The states in which a record is a tombstone.
local ENDED = {done = true, cancelled = true, expired = true, dead = true}

local function job_key(id) return KEY.job .. id end
local function held_key(worker) return KEY.held .. worker end
-- Raises for what is no class; a record may say anything.
local function key_of_class(keys, class)
  local number = tonumber(class)
  if not number or number < 0 or number >= CLASSES then error('a class must be a number below ' .. CLASSES) end
  return keys .. class
end
-- ZSET of a class's queued jobs. The score is a job's turn, and the lowest goes first.
--
-- Turns are those of start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996): a virtual time, counted in samples. A
-- job's turn is where the last job of its tenant ended, or the turn of the job that was given last, if that is later. So
-- tenants with jobs that wait get equally many samples, and a backlog of one holds up no other. A job keeps its turn, so
-- one that comes back goes first. A client is a tenant; those whose ids begin with the same label, <label>/, are one.
-- `load` has the turn of the job that was given last, in turn<class>, and the samples of all queues, in `queued`.
local function queue_key(class) return key_of_class(KEY.queues, class) end
-- ZSET tenant -> where its last job of a class ended. What is behind the current turn says nothing and is deleted, see
-- reap; so is the turn of a client whose last open job was not done, see fail.
local function turns_key(class) return key_of_class(KEY.turns, class) end
local function tenant_of(client) return match(client, '^([^/]+)/') or client end
-- SET of a client's open jobs.
local function client_key(client) return KEY.client .. client end
-- ZSET of jobs that need newer weights, or another adapter, than the workers that looked at them had. The score is the
-- version that a job needs; for an adapter, ADAPTERS_FROM times its number in the pool is added. A worker may take one range
-- of scores for its weights, and one for each of its adapters. Jobs that prefer a worker wait here for it too, at minus
-- that worker's number. ZSET `prefers` says until when. Of one score the lowest turn goes first: it is a part of the member.
-- A job for exactly one version waits for it below these, at exact_score.
local function later_key(class) return key_of_class(KEY.later, class) end
local function exact_score(version) return -ADAPTERS_FROM - version end
-- The one version that a job with this min_version wants, or nil. Raises for what is no version.
local function exactly(min_version)
  local exact = min_version and match(min_version, '^=(.*)$')
  return exact and (whole(exact) or error('an exact version must be a number')) or nil
end
local function later_member(id, turn) return string.format('%015d:%s', whole(turn) or 0, id) end
local function id_of(member) return string.sub(member, -32) end
-- Jobs that need what only some engines can do wait there, too, at SLOTS_FROM + SLOT * <number of their names> + <tokens of
-- context>.
-- HASH `needs` has these numbers, and what workers can do; see claim.
local needs_key = KEY.needs
-- LIST of jobs on their last chance. Each runs alone on its worker. If it kills engines, no other job is lost with it.
-- If another job does, this one is not lost.
local suspects_key = KEY.suspects
-- HASH of the workers that share what waits, see spread in lib_spread.lua.
local takers_key = KEY.takers
local prefers_key = KEY.prefers

-- A worker that blocks on `wake` gets a token, claims, and passes it on while work is left. There are as many tokens as new
-- jobs, or as workers. Each worker also has a token of its own, `token:<id>`, for jobs that only it will take.
local function wake(worker, tokens)
  local key = worker and KEY.token .. worker or KEY.wake
  local more = (tokens or 1) - redis.call('LLEN', key)
  if more > 0 then
    local new = {}
    for i = 1, more do new[i] = '1' end
    redis.call('LPUSH', key, unpack(new))
    redis.call('EXPIRE', key, 60)
  end
end

local function append(list, ...)
  for _, value in ipairs({...}) do list[#list + 1] = value end
end

-- Put a job into its queue, for so many samples.
local function to_queue(id, class, turn, samples)
  if redis.call('ZADD', queue_key(class), whole(turn) or 0, id) == 1 then
    redis.call('HINCRBY', load_key, 'queued', samples)
  end
end

-- Samples that a job with n of them, of which d are published, still has to generate.
local function unpublished(n, d) return math.max(0, (whole(n) or 0) - (whole(d) or 0)) end

-- Whether this worker holds a lease.
local function alive(worker)
  local lease = redis.call('ZSCORE', KEY.workers, worker)
  return lease and tonumber(lease) > clock().leases
end

-- For a worker whose lease is not there. It holds nothing then; if it does, somebody deleted the leases. With a lease that
-- is over, the next reap takes its jobs back.
local function leave_to_others(worker)
  if redis.call('SCARD', held_key(worker)) > 0 then redis.call('ZADD', KEY.workers, 'NX', 0, worker) end
end

local function ring(...)
  redis.call('XADD', KEY.bell, 'MAXLEN', '~', 512, '*', ...)
end

