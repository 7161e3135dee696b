-- Save what unfinished samples have generated, so that the next worker goes on from there.
-- ARGV: prefix, worker id, then per piece: job id, attempt, sample, number of the piece, its bytes
-- Returns per piece: ok, fenced, or gap (see save_partial).
local worker, states = ARGV[2], {}
for i = 3, #ARGV, 5 do
  local id = ARGV[i]
  local mine = owns(id, worker, ARGV[i + 1])
  states[#states + 1] = mine and save_partial(job_key(id), ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]) or 'fenced'
end
return states
