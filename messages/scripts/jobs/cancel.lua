-- Cancel jobs wherever they are. Samples already published stand; a running job's worker hears the bell, and anything
-- it still publishes is refused.
-- ARGV: prefix, cause, *job_ids
-- Returns per job: ok, or the state it already had ended in, or unknown.
local states, running = {}, {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local state = cancel(id, ARGV[2])
  if state == 'r' then running[#running + 1] = id end
  states[#states + 1] = (state == 'q' or state == 'r') and 'ok' or state or 'unknown'
end
ring_cancelled(running)
return states
