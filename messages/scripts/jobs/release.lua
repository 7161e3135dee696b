-- A worker gives unfinished jobs back. They go to the front of their queues with the tokens generated so far. With `lost`
-- 0 (drain, preemption) this is not counted. With 1 (their engine died) it counts like a lost lease.
-- ARGV: prefix, worker, max_lost, *jobs
-- A job is: its id, its attempt, lost (0 or 1), the number of its partials, and for each of these sample, number of
-- the piece, payload (see checkpoint).
-- Returns per job: ok, dead or fenced.
local worker, max_lost = ARGV[2], tonumber(ARGV[3])
local states, i = {}, 4
local function give_back(id, attempt, lost, partials)
  local state = owns(id, worker, attempt) and 'ok' or 'fenced'
  if redis.call('EXISTS', job_key(id)) == 0 then redis.call('SREM', held_key(worker), id) end   -- evicted, or deleted
  if state == 'ok' then
    local total = lost > 0 and redis.call('HINCRBY', job_key(id), 'c', lost) or 0
    if total >= max_lost then
      dead_letter(id, 'the engine under it died or failed ' .. total .. ' times', worker, '')
      state = 'dead'
    else
      for k = i + 4, i + 1 + 3 * partials, 3 do
        save_partial(job_key(id), ARGV[k], ARGV[k + 1], ARGV[k + 2])
      end
      requeue(id, worker, max_lost)
      wake()
    end
  end
  return state
end
while i <= #ARGV do
  local id, partials = ARGV[i], tonumber(ARGV[i + 3])
  states[#states + 1] = alone(id, give_back, id, ARGV[i + 1], tonumber(ARGV[i + 2]), partials) or 'dead'
  i = i + 4 + 3 * partials
end
return states
