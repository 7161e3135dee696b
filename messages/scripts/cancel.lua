-- Cancel jobs wherever they are. Samples already published stand; a running job's worker hears the bell, and anything
-- it still publishes is refused.
-- ARGV: prefix, cause, job ids
-- Returns per job: ok, or the state it already had ended in, or unknown.
local states = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local state = redis.call('HGET', job_key(id), 'st')
  if state == 'q' or state == 'r' then
    fail(id, 'cancelled', ARGV[2], '', '')
    if state == 'r' then ring('kind', 'cancel', 'id', id) end
    state = 'ok'
  end
  states[#states + 1] = state or 'unknown'
end
return states
