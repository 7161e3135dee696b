-- Publish finished samples, each exactly once, and close jobs that have all of theirs.
-- ARGV: prefix, worker id, then per sample: job id, attempt, sample, result bytes
-- Returns per sample: ok, again (this very sample was published before), or fenced (not this worker's attempt any more).
local worker = ARGV[2]
local states, streams = {}, {}
for i = 3, #ARGV, 4 do
  local id, attempt, sample = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local key = job_key(id)
  local f = redis.call('HMGET', key, 'st', 'w', 'a', 'd', 'n', 'y', 's' .. sample)
  local state = 'ok'
  if f[1] == 'done' or (f[7] and f[3] == attempt) then
    state = 'again'
  elseif f[1] ~= 'r' or f[2] ~= worker or f[3] ~= attempt then
    state = 'fenced'
  elseif tonumber(sample) >= tonumber(f[5]) then
    return redis.error_reply('ERR sample ' .. sample .. ' of a job with ' .. f[5] .. ' samples')
  else
    local reply = prefix .. 'reply:' .. f[6]
    local done = tonumber(f[4]) + 1
    -- l marks the job's last result: a client that has forgotten which ones it took before still knows when to stop.
    redis.call('XADD', reply, '*', 'j', id, 's', sample, 'm', ARGV[i + 3], 'l', done == tonumber(f[5]) and 1 or 0)
    streams[reply] = true
    if done == tonumber(f[5]) then
      finish(id, 'done', worker)
    else
      redis.call('HSET', key, 's' .. sample, 1, 'd', done)
      redis.call('HDEL', key, 'k' .. sample)
    end
  end
  states[#states + 1] = state
end
for reply in pairs(streams) do redis.call('EXPIRE', reply, REPLY_TTL_S) end
return states
