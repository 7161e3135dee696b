-- Accept jobs in order, up to the first that does not fit.
-- ARGV: prefix, max_jobs, max_bytes, max_unread, letter,
--       *jobs (job_id, payload, n, priority, client, min_version, max_staleness, deadline_ms, group, adapter, prefers,
--       digest, needs)
-- max_bytes: payloads of open jobs and their saved pieces, results that nobody has taken yet, dead letters, and recorded sessions. max_unread: bytes of results
-- that one client may leave untaken. letter: entry id of the dead letter that the job replaces.
-- min_version: the least one, or =<version> for exactly that one. adapter: <name>@<least version>. prefers: the worker it prefers, as <ms>@<worker id>. letter, max_staleness,
-- deadline_ms (from now), group, adapter, prefers and needs are '' for none. digest: of the job's content, see same_job. needs: what
-- an engine must be able to do, see claim.
-- Returns one of new|q|r|done|cancelled|expired|dead per job; if one does not fit, in its place and as the last:
--   BUSY, why (jobs|bytes|unread), open jobs, bytes as for max_bytes, untaken bytes of this client
-- An id that is open for another client, or with another payload, or that ended with another digest: nothing is accepted.
-- Returned are TAKEN and, for each of these, its place in the call (from 0), the state of the job that has the id, and its client if it is open.
-- If the dead letter is gone, nothing is accepted. The job's state is returned, or gone if there is no such job either.
local STRIDE = 13
local max_jobs, max_bytes, max_unread, letter = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
if letter ~= '' and #redis.call('XRANGE', KEY.dead, letter, letter) == 0 then
  return {redis.call('HGET', job_key(ARGV[6]), JOB.state) or 'gone'}
end
local taken, given, state_of = {}, {}, {}
for i = 6, #ARGV, STRIDE do
  local id, payload, client = ARGV[i], ARGV[i + 1], ARGV[i + 4]
  local state, same, owner = redis.call('HGET', job_key(id), JOB.state), not given[id] or given[id] == payload, client
  if state then
    local its, size, digest = unpack(redis.call('HMGET', job_key(id), JOB.client, JOB.nbytes, JOB.digest))
    local open = state == 'q' or state == 'r'
    same = same and ((not open and (digest or ARGV[i + 11]) == ARGV[i + 11]) or
      (its == client and size == tostring(#payload) and redis.call('HGET', job_key(id), JOB.payload) == payload))
    owner = open and its or client
  end
  state_of[id] = state
  if not same then append(taken, (i - 6) / STRIDE, state or 'new', owner) end
  given[id] = payload
end
if #taken > 0 then return {'TAKEN', unpack(taken)} end
local load = redis.call('HMGET', load_key, 'jobs', 'bytes', 'unread', 'letters', 'saved', 'turn0', 'turn1', 'turn2', 'cap',
  'session_bytes')
local jobs, open_bytes = counted(load[1]), counted(load[2])
local kept = counted(load[3]) + counted(load[4]) + counted(load[5]) + counted(load[10])
local accepted, bytes = 0, 0
local now = string.format('%.0f', clock().now)   -- Redis turns a text into an argument much faster than a number
local states, unread, next_turns, samples = {}, {}, {}, 0

-- Redis keeps a short sorted set as a list that it searches from the front, unless something was too long for that. With many
-- jobs for an empty queue that is a quarter of what they cost.
local MANY = 16
local opened, LONG_MEMBER = {}, string.rep('-', 65)

-- Why a job may not come in now, or nil. One job is let into an empty pool whatever its size: it would never fit later.
local function misfit(size, client)
  unread[client] = unread[client] or counted(redis.call('HGET', KEY.unread, client))
  if unread[client] > max_unread then return 'unread' end
  if jobs + accepted == 0 then return kept > max_bytes and 'bytes' or nil end
  if jobs + accepted >= max_jobs then return 'jobs' end
  if open_bytes + bytes + size + kept > max_bytes then return 'bytes' end
end

-- The turn of a tenant's next job, which has so many samples.
local function turn(tenant, class, n)
  local turns = next_turns[class] or {}
  next_turns[class] = turns
  local turn = turns[tenant]
    or math.max(counted(load[6 + class]), counted(redis.call('ZSCORE', turns_key(class), tenant)))
  turns[tenant] = turn + n
  return string.format('%.0f', turn)
end

for i = 6, #ARGV, STRIDE do
  local id, payload, n, class, client = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local key, state = job_key(id), state_of[id]
  if not state then
    local why = misfit(#payload, client)
    if why then
      if letter == '' then redis.call('HSET', load_key, 'busy', redis_ms() .. ' ' .. why .. ' ' .. client) end   -- for people
      append(states, 'BUSY', why, jobs + accepted, open_bytes + bytes + kept, unread[client])
      break
    end
    state, state_of[id] = 'new', 'q'
    local its_turn = turn(tenant_of(client), class + 0, n)
    redis.call('HSET', key, JOB.state, 'q', JOB.payload, payload, JOB.samples, n, JOB.priority, class, JOB.client, client,
               JOB.nbytes, #payload, JOB.accepted, now, JOB.attempt, '0', JOB.published, '0', JOB.digest, ARGV[i + 11],
               JOB.turn, its_turn)
    redis.call('SADD', client_key(client), id)
    if ARGV[i + 5] ~= '0' then redis.call('HSET', key, JOB.min_version, ARGV[i + 5]) end
    if ARGV[i + 6] ~= '' then redis.call('HSET', key, JOB.max_staleness, ARGV[i + 6]) end
    if ARGV[i + 7] ~= '' then
      local deadline = now + tonumber(ARGV[i + 7])
      redis.call('HSET', key, JOB.deadline, deadline)
      redis.call('ZADD', KEY.deadlines, deadline, id)
    end
    if ARGV[i + 8] ~= '' then redis.call('HSET', key, JOB.group, ARGV[i + 8]) end
    if ARGV[i + 9] ~= '' then redis.call('HSET', key, JOB.adapter, ARGV[i + 9]) end
    if ARGV[i + 10] ~= '' then redis.call('HSET', key, JOB.prefers, ARGV[i + 10]) end
    if ARGV[i + 12] ~= '' then redis.call('HSET', key, JOB.needs, ARGV[i + 12]) end
    if not opened[class] and #ARGV > MANY * STRIDE then
      redis.call('ZADD', queue_key(class), 0, LONG_MEMBER)
      opened[class] = true
    end
    redis.call('ZADD', queue_key(class), its_turn, id)
    accepted, bytes, samples = accepted + 1, bytes + #payload, samples + n
  end
  states[#states + 1] = state
end
-- Only a job that is in replaces the letter: a busy pool leaves it where it is.
if letter ~= '' and states[1] ~= 'BUSY' then drop_letter(letter) end
if accepted > 0 then
  if load[9] ~= ARGV[3] then redis.call('HSET', load_key, 'cap', ARGV[3]) end
  redis.call('HINCRBY', load_key, 'jobs', accepted)
  redis.call('HINCRBY', load_key, 'bytes', bytes)
  redis.call('HINCRBY', load_key, 'accepted', accepted)
  redis.call('HINCRBY', load_key, 'queued', samples)
  redis.call('HINCRBY', load_key, 'offered', samples)
  for class in pairs(opened) do redis.call('ZREM', queue_key(class), LONG_MEMBER) end
  for class, turns in pairs(next_turns) do
    for tenant, at in pairs(turns) do redis.call('ZADD', turns_key(class), at, tenant) end
  end
  wake(nil, math.min(accepted, math.max(1, redis.call('HLEN', takers_key))))
end
return states
