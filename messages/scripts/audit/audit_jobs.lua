-- What a job's record says and what the indexes say of it, for each job in one step. Changes nothing.
-- ARGV: prefix, search, *job_ids
-- search: 1 to search the list of suspects too, which costs its length.
-- Returns per job: {state, class, owner, client, bytes, deadline, TTL in ms, held by its owner, owner's lease, entry in
--   deadlines, in its client's set, indexes of queued jobs it is in: name, times, ...}; false where there is nothing
local search, seen = ARGV[2] == '1', {}

-- A key of the wrong type is found as such; here it counts as one without members.
local function member(key, id) return redis.pcall('SISMEMBER', key, id) == 1 and 1 or 0 end

for i = 3, #ARGV do
  local id, key = ARGV[i], job_key(ARGV[i])
  local f = redis.pcall('HMGET', key,
    JOB.state, JOB.priority, JOB.owner, JOB.client, JOB.nbytes, JOB.deadline, JOB.turn)
  if f.err then f = {false, false, false, false, false, false, false} end
  local places = {}
  for class = 0, CLASSES - 1 do
    if redis.call('ZSCORE', later_key(class), later_member(id, f[7])) then append(places, 'later:' .. class, 1) end
    if redis.call('ZSCORE', queue_key(class), id) then append(places, 'queued:' .. class, 1) end
  end
  if search then
    local times = #redis.call('LPOS', suspects_key, id, 'COUNT', 0)
    if times > 0 then append(places, 'suspects', times) end
  end
  local owner, client = f[3] or '', f[4] or ''
  seen[#seen + 1] = {
    f[1], f[2], f[3], f[4], f[5], f[6], redis.call('PTTL', key),
    member(held_key(owner), id), redis.call('ZSCORE', KEY.workers, owner),
    redis.call('ZSCORE', KEY.deadlines, id), member(client_key(client), id), places,
  }
end
return seen
