-- Cancel a part of a client's open jobs, or of those of one group. Call it again until the cursor is 0.
-- ARGV: prefix, client, group, cause, cursor, count
-- group: '' for all. cursor: 0 to begin. count: jobs to look at.
-- Returns {cursor, jobs cancelled}
local group, cancelled, running = ARGV[3], 0, {}
local found = redis.call('SSCAN', client_key(ARGV[2]), ARGV[5], 'COUNT', ARGV[6])
for _, id in ipairs(found[2]) do
  -- A job without a group is a group of its own.
  if group == '' or group == (redis.call('HGET', job_key(id), JOB.group) or id) then
    if cancel(id, ARGV[4]) == 'r' then running[#running + 1] = id end
    cancelled = cancelled + 1
  end
end
ring_cancelled(running)
return {found[1], cancelled}
