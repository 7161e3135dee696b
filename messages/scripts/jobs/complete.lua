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
  local stands, owner, current, published, samples, there, client, nbytes, deadline, digest, saved = unpack(redis.call(
    'HMGET', key, JOB.state, JOB.owner, JOB.attempt, JOB.published, JOB.samples, JOB.sample .. sample, JOB.client, JOB.nbytes,
    JOB.deadline, JOB.digest, JOB.saved))
  local state = 'ok'
  if stands == 'done' or (there and current == attempt) then
    state = 'again'
    if stands ~= 'done' and agreed[id] ~= published then
      must_agree(key, published, samples)
      agreed[id] = published
    end
  elseif stands ~= 'r' or owner ~= worker or current ~= attempt
    or not string.match(sample, '^%d+$') or tonumber(sample) >= tonumber(samples) then
    state = 'fenced'
  else
    local result, done, n, bytes = ARGV[i + 3], whole(published) + 1, whole(samples), whole(nbytes) + 0
    local last = done == n
    if done > 1 and done >= n then must_agree(key, published, samples) end
    -- l marks the job's last result: a client that has forgotten which ones it took before still knows when to stop.
    redis.call('XADD', KEY.reply .. client, '*', ENTRY.job, id, ENTRY.sample, sample,
               ENTRY.result, result, ENTRY.last, last and '1' or '0')
    unread[client] = (unread[client] or 0) + ENTRY_BYTES + #result
    if last then
      close_record(id, 'done', worker, client, deadline, saved, digest)
      done_jobs, done_bytes = done_jobs + 1, done_bytes + bytes
    else
      redis.call('HSET', key, JOB.sample .. sample, 1, JOB.published, done)
      if saved and dropped < DROPPED then dropped = dropped + drop_pieces_from(key, sample, 0) end
    end
  end
  return state
end
for i = 3, #ARGV, 4 do states[#states + 1] = alone(ARGV[i], publish, i) or 'fenced' end
for client, bytes in pairs(unread) do
  redis.call('EXPIRE', KEY.reply .. client, REPLY_TTL_S)
  count_unread(client, bytes)
end
if done_jobs > 0 then jobs_ended(done_jobs, done_bytes, 'done') end
return states
