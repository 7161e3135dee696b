-- End jobs that are past their deadline. Workers do it with every heartbeat; clients too, for a pool without workers.
-- A client's own jobs are looked after, too: nobody else knows whose a job is that has lost its record.
-- ARGV: prefix, most, heard, passed, client
-- most: jobs that one call ends. heard, passed: what the caller witnessed, see tick. client: who asks, '' for nobody.
-- Returns {how many were ended, the pool's clock, the newest entry of the client's reply stream, '' for none, and the
--   number of its entries}
local client = ARGV[5]
local LOOKS = 32              -- of its open jobs a call looks at so many, by chance

-- A job's record is the truth. What an index has lost of it is put back there.
local function put_back(id, f)
  local state, deadline, class, owner = f[1], f[4], f[8], f[9] or ''
  if deadline and not redis.call('ZSCORE', prefix .. 'deadlines', id) then
    redis.call('ZADD', prefix .. 'deadlines', deadline, id)
  end
  if state == 'r' then
    if redis.call('SISMEMBER', held_key(owner), id) == 0 then
      requeue(id, owner, math.huge)   -- when its worker is lost nobody would take it back
      wake()
    end
    return
  end
  local score = redis.call('ZSCORE', later_key(class), later_member(id, f[10]))
  if not score and redis.call('LLEN', suspects_key) == 0 then
    to_queue(id, class, f[10], unpublished(f[6], f[5]))   -- where it is already, nearly always
  elseif score and tonumber(score) < 0 and not redis.call('ZSCORE', prefers_key, id) then
    redis.call('ZADD', prefers_key, 0, id)
  end
end

-- Returns why the job has to end, nil if it need not.
local function look_at(id)
  local f = redis.call('HMGET', job_key(id), 'st', 'a', 't', 'e', 'd', 'n', 'y', 'q', 'w', 'T')
  if #id ~= 32 or not string.match(id, '^%x+$') or (f[7] and f[7] ~= client) or ENDED[f[1]] then
    redis.call('SREM', client_key(client), id)   -- nobody's job, another client's, or one that has ended
  elseif redis.call('EXISTS', job_key(id)) == 0 then
    return 'its record is gone'
  else
    local there = redis.call('HEXISTS', job_key(id), 'p') == 1
    local wrong = f[1] ~= 'q' and f[1] ~= 'r' and 'st' or damaged(there, f[2], f[3], f[4], f[5], f[6], f[7], f[8])
    if wrong then return string.format(DAMAGED, wrong) end
    put_back(id, f)
  end
end

if client ~= '' then redis.call('XLEN', prefix .. 'reader:' .. client) end   -- what is no stream is set aside
local lost = {}
for _, id in ipairs(client ~= '' and redis.call('SRANDMEMBER', client_key(client), LOOKS) or {}) do
  local _, why = attempt(look_at, id)
  if why then
    lost[#lost + 1] = id
    -- What is no record is set aside, or deleted for a user who may not do that.
    if not attempt(redis.call, 'HSET', job_key(id), 'y', client) then
      redis.call('DEL', job_key(id))
      redis.call('HSET', job_key(id), 'y', client)
    end
    fail(id, 'dead', 'what Redis has of it is damaged', '', why)
  end
end
ring_cancelled(lost)
local at = tick(whole(ARGV[3]), whole(ARGV[4]))
local ended, replies = end_overdue(tonumber(ARGV[2])), prefix .. 'reply:' .. client
local newest = redis.call('XREVRANGE', replies, '+', '-', 'COUNT', 1)[1]
return {ended, at, newest and newest[1] or '', redis.call('XLEN', replies)}
