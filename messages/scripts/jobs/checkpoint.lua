-- Save pieces of unfinished samples, so the next worker continues from there.
-- ARGV: prefix, worker, *pieces (job_id, attempt, sample, number, payload, tell)
-- tell: 1 to tell the client.
-- Returns per piece: ok, fenced, gap or full (see save_partial).
-- The client finds a notice in its `news`, and the piece here. News is short, and nobody needs to read it.
local worker, states = ARGV[2], {}
local function save(i)
  local id, sample, number, bytes = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local key, state = job_key(id), 'fenced'
  if owns(id, worker, ARGV[i + 1]) then
    state = save_partial(key, sample, number, bytes)
    if state == 'ok' and ARGV[i + 5] == '1' then
      local news = KEY.news .. redis.call('HGET', key, JOB.client)
      redis.call('XADD', news, 'MAXLEN', '~', NEWS, '*', ENTRY.job, id, ENTRY.sample, sample)
      redis.call('EXPIRE', news, NEWS_TTL_S)
    end
  end
  return state
end
for i = 3, #ARGV, 6 do states[#states + 1] = alone(ARGV[i], save, i) or 'fenced' end
return states
