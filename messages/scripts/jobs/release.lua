-- A worker gives unfinished jobs back. They go into their queues at their turns, with the tokens generated so far. With `lost`
-- 0 (drain, preemption) this is not counted. With 1 (their engine died) it counts like a lost lease.
-- ARGV: prefix, worker, max_lost, to, *jobs
-- to: a worker that takes them over, '' for anybody. Nobody else gets them for HANDED_MS, and it counts as no redelivery.
-- A job is: its id, its attempt, lost (0 or 1), the number of its partials, and for each of these sample, number of
-- the piece, payload (see checkpoint).
-- Returns per job: ok, dead or fenced; with `to` also kept: the job is still this worker's, because that worker is not there,
-- not all of its tokens found room, or it was lost before: what may kill an engine goes to no other one.
local HANDED_MS = 1000
local worker, max_lost, to = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local states, i = {}, 5

local function hand_to(id)
  local class, turn, lost = unpack(redis.call('HMGET', job_key(id), JOB.priority, JOB.turn, JOB.lost))
  if counted(lost) > 0 or not leave_to(to, id, class, turn, clock().deadlines + HANDED_MS) then return 'kept' end
  disown(id, worker, class)
  redis.call('HSET', job_key(id), JOB.prefers, '0@' .. to, JOB.moving, 1)
  redis.call('HINCRBY', job_key(id), JOB.moves, 1)
  redis.call('HINCRBY', load_key, 'moved', 1)
  return 'ok'
end

local function give_back(id, attempt, lost, partials)
  local state = owns(id, worker, attempt) and 'ok' or 'fenced'
  if redis.call('EXISTS', job_key(id)) == 0 then redis.call('SREM', held_key(worker), id) end   -- evicted, or deleted
  if state == 'ok' then
    local total = lost > 0 and redis.call('HINCRBY', job_key(id), JOB.lost, lost) or 0
    if total >= max_lost then
      dead_letter(id, 'the engine under it died or failed ' .. total .. ' times', worker, '')
      state = 'dead'
    else
      local saved = true
      for k = i + 4, i + 1 + 3 * partials, 3 do
        saved = save_partial(job_key(id), ARGV[k], ARGV[k + 1], ARGV[k + 2]) == 'ok' and saved
      end
      if to ~= '' then return saved and hand_to(id) or 'kept' end
      requeue_or_suspect(id, worker, max_lost)
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
