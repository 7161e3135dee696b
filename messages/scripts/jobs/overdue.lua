-- End jobs that are past their deadline. Workers do it with every heartbeat; clients too, for a pool without workers.
-- A client's own jobs are looked after, too: nobody else knows whose a job is that has lost its record.
-- ARGV: prefix, most, heard, passed, client
-- most: jobs that one call ends. heard, passed: what the caller witnessed, see tick. client: who asks, '' for nobody.
-- Returns {how many were ended, the pool's clock, the newest entry of the client's reply stream, '' for none, and the
--   number of its entries}
local client = ARGV[5]
local LOOKS = 32              -- of its open jobs a call looks at so many, by chance

-- A job's record is the truth. What an index has lost of it is put back there.
local function put_back(id, state, owner, class, turn, deadline, samples, published)
  if deadline and not redis.call('ZSCORE', KEY.deadlines, id) then
    redis.call('ZADD', KEY.deadlines, deadline, id)
  end
  if state == 'r' then
    if redis.call('SISMEMBER', held_key(owner or ''), id) == 0 then
      requeue_or_suspect(id, owner or '', math.huge)   -- when its worker is lost nobody would take it back
      wake()
    end
    return
  end
  local score = redis.call('ZSCORE', later_key(class), later_member(id, turn))
  if not score and redis.call('LLEN', suspects_key) == 0 then
    to_queue(id, class, turn, unpublished(samples, published))   -- where it is already, nearly always
  elseif score and tonumber(score) < 0 and tonumber(score) > -ADAPTERS_FROM and not redis.call('ZSCORE', prefers_key, id) then
    redis.call('ZADD', prefers_key, 0, id)
  end
end

-- Returns why the job has to end, nil if it need not.
local function look_at(id)
  local state, its, attempt, accepted, deadline, samples, published, class, turn, owner = unpack(redis.call('HMGET',
    job_key(id), JOB.state, JOB.client, JOB.attempt, JOB.accepted, JOB.deadline, JOB.samples, JOB.published, JOB.priority,
    JOB.turn, JOB.owner))
  if #id ~= 32 or not string.match(id, '^%x+$') or (its and its ~= client) or ENDED[state] then
    redis.call('SREM', client_key(client), id)   -- nobody's job, another client's, or one that has ended
  elseif redis.call('EXISTS', job_key(id)) == 0 then
    return 'its record is gone'
  else
    local there = redis.call('HEXISTS', job_key(id), JOB.payload) == 1
    local wrong = state ~= 'q' and state ~= 'r' and JOB.state
      or damaged(there, attempt, accepted, deadline, published, samples, its, class)
    if wrong then return string.format(DAMAGED, wrong) end
    put_back(id, state, owner, class, turn, deadline, samples, published)
  end
end

if client ~= '' then redis.call('XLEN', KEY.reader .. client) end   -- what is no stream is set aside
local lost = {}
for _, id in ipairs(client ~= '' and redis.call('SRANDMEMBER', client_key(client), LOOKS) or {}) do
  local _, why = attempt(look_at, id)
  if why then
    lost[#lost + 1] = id
    -- What is no record is set aside, or deleted for a user who may not do that.
    if not attempt(redis.call, 'HSET', job_key(id), JOB.client, client) then
      redis.call('DEL', job_key(id))
      redis.call('HSET', job_key(id), JOB.client, client)
    end
    fail(id, 'dead', 'what Redis has of it is damaged', '', why)
  end
end
ring_cancelled(lost)
local at = tick(whole(ARGV[3]), whole(ARGV[4]))
expire_sessions()
local ended, replies = end_overdue(tonumber(ARGV[2])), KEY.reply .. client
local newest = redis.call('XREVRANGE', replies, '+', '-', 'COUNT', 1)[1]
return {ended, at, newest and newest[1] or '', redis.call('XLEN', replies)}
