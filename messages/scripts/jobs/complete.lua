-- Publish finished samples, each exactly once, and close jobs whose samples are all published.
-- ARGV: prefix, worker, *samples (job_id, attempt, sample, payload)
-- Returns per sample: ok, again (this very sample was published before), or fenced (not this worker's attempt any more,
-- or a sample that the job does not have; or the job was dead-lettered here, because its record or its client's reply
-- stream cannot be used).
local worker = ARGV[2]
local states, unread = {}, {}
local done_jobs, done_bytes = 0, 0
local DROPPED = 4096          -- pieces that one call deletes; what is left goes with the job's record
local dropped, agreed = 0, {} -- agreed: job -> number of its samples that were counted in this call
local function publish(i)
  local id, attempt, sample = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local key = job_key(id)
  local f = redis.call('HMGET', key, 'st', 'w', 'a', 'd', 'n', 'y', 's' .. sample, 'z', 'e', 'h', 'kk')
  local state = 'ok'
  if f[1] == 'done' or (f[7] and f[3] == attempt) then
    state = 'again'
    if f[1] ~= 'done' and agreed[id] ~= f[4] then
      must_agree(key, f[4], f[5])
      agreed[id] = f[4]
    end
  elseif f[1] ~= 'r' or f[2] ~= worker or f[3] ~= attempt
    or not string.match(sample, '^%d+$') or tonumber(sample) >= tonumber(f[5]) then
    state = 'fenced'
  else
    local client, result = f[6], ARGV[i + 3]
    local done, nbytes, n = whole(f[4]) + 1, whole(f[8]) + 0, whole(f[5])
    local last = done == n
    if done > 1 and done >= n then must_agree(key, f[4], f[5]) end
    -- l marks the job's last result: a client that has forgotten which ones it took before still knows when to stop.
    redis.call('XADD', prefix .. 'reply:' .. client, '*', 'j', id, 's', sample, 'm', result, 'l', last and '1' or '0')
    unread[client] = (unread[client] or 0) + ENTRY_BYTES + #result
    if last then
      bury_record(id, 'done', worker, {y = client, e = f[9], h = f[10], kk = f[11]})   -- it waits nowhere
      done_jobs, done_bytes = done_jobs + 1, done_bytes + nbytes
    else
      redis.call('HSET', key, 's' .. sample, 1, 'd', done)
      if f[11] and dropped < DROPPED then dropped = dropped + drop_pieces_from(key, sample, 0) end
    end
  end
  return state
end
for i = 3, #ARGV, 4 do states[#states + 1] = alone(ARGV[i], publish, i) or 'fenced' end
for client, bytes in pairs(unread) do
  redis.call('EXPIRE', prefix .. 'reply:' .. client, REPLY_TTL_S)
  count_unread(client, bytes)
end
if done_jobs > 0 then jobs_ended(done_jobs, done_bytes, 'done') end
return states
