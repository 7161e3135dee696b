-- End jobs with the tokens that they have. The worker of a running job publishes its unfinished samples as they are. A
-- queued job without any token is cancelled. A queued job with saved or published tokens is ended by the next worker
-- that claims it, on any weights.
-- ARGV: prefix, cause, *job_ids
-- cause: the reason shown for a cancellation.
-- Returns per job: ok, unbegun (it was cancelled), the state in which it had already ended, or unknown.
local states, running, queued = {}, {}, false
local function stop(id)
  local key = job_key(id)
  local f = redis.call('HMGET', key, 'st', 'kk', 'q', 'd', 'T', 'n')
  local state = f[1] or 'unknown'
  if state == 'q' and not f[2] and f[4] == '0' then
    fail(id, 'cancelled', ARGV[2], '', '')
    state = 'unbegun'
  elseif state == 'q' or state == 'r' then
    redis.call('HSET', key, 'x', 1)
    if state == 'r' then
      running[#running + 1] = id
    else
      from_later(id, f[3], f[5], f[6], f[4])
      redis.call('ZREM', prefers_key, id)
      queued = true
    end
    state = 'ok'
  end
  return state
end
for i = 3, #ARGV do
  local fine, state = attempt(stop, ARGV[i])
  if not fine then fail(ARGV[i], 'dead', 'what Redis has of it is damaged', '', state) end
  states[#states + 1] = fine and state or 'dead'
end
if #running > 0 then ring('kind', 'stop', 'ids', table.concat(running, ' ')) end
if queued then wake() end
return states
