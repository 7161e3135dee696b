-- Cancel queued and running jobs. Published samples stay valid. The worker of a running job hears the bell, and its
-- later results are refused.
-- ARGV: prefix, cause, *job_ids
-- Returns per job: ok, the state in which it had already ended, or unknown.
local states, running = {}, {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local state = cancel(id, ARGV[2])
  if state == 'r' then running[#running + 1] = id end
  states[#states + 1] = (state == 'q' or state == 'r') and 'ok' or state or 'unknown'
end
ring_cancelled(running)
return states
