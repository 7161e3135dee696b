-- End jobs with the tokens that they have. The worker of a running job publishes its unfinished samples as they are. A
-- queued job without any token is cancelled. A queued job with saved or published tokens is ended by the next worker
-- that claims it, on any weights.
-- ARGV: prefix, cause, *job_ids
-- cause: the reason shown for a cancellation.
-- Returns per job: ok, unbegun (it was cancelled), the state in which it had already ended, or unknown.
local states, running, queued = {}, {}, false
local function stop(id)
  local key = job_key(id)
  local state, saved, class, turn, samples, published = unpack(redis.call('HMGET', key,
    JOB.state, JOB.saved, JOB.priority, JOB.turn, JOB.samples, JOB.published))
  state = state or 'unknown'
  if state == 'q' and not saved and published == '0' then
    fail(id, 'cancelled', ARGV[2], '', '')
    state = 'unbegun'
  elseif state == 'q' or state == 'r' then
    redis.call('HSET', key, JOB.ending, 1)
    if state == 'r' then
      running[#running + 1] = id
    else
      from_later(id, class, turn, samples, published)
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
