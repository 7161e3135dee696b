-- Members of an index and the jobs they name, each looked at in one step. Changes nothing.
-- ARGV: prefix, index, *job_ids
-- index: its key without the prefix.
-- Returns per id: {1 if it is a member, its score if it has one, the job's state, class, owner, client, deadline}; false
--   where there is nothing
local key = prefix .. ARGV[2]
local kind = redis.call('TYPE', key).ok
local seen = {}
for i = 3, #ARGV do
  local id, member, score = ARGV[i], false, false
  if kind == 'set' then
    member = redis.call('SISMEMBER', key, id) == 1
  elseif kind == 'zset' then
    score = redis.call('ZSCORE', key, id)
    member = score and true
  end
  local f = redis.pcall('HMGET', job_key(id_of(id)), JOB.state, JOB.priority, JOB.owner, JOB.client, JOB.deadline)
  if f.err then f = {'of a wrong type', false, false, false, false} end
  seen[#seen + 1] = {member and 1 or 0, score, f[1], f[2], f[3], f[4], f[5]}
end
return seen
