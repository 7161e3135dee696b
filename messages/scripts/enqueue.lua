-- Accept jobs, all or none.
-- ARGV: prefix, max open jobs, max open bytes, then per job: id, payload, n, class, client id, min_version,
--       max_staleness ('' for none), deadline from now in ms ('' for none)
-- Returns {'BUSY', open jobs, open bytes}, or one of new|q|r|done|cancelled|expired|dead per job.
local STRIDE = 8
local max_jobs, max_bytes = tonumber(ARGV[2]), tonumber(ARGV[3])
local jobs, bytes, seen = 0, 0, {}
for i = 4, #ARGV, STRIDE do
  if not seen[ARGV[i]] and redis.call('EXISTS', job_key(ARGV[i])) == 0 then
    seen[ARGV[i]] = true
    jobs = jobs + 1
    bytes = bytes + #ARGV[i + 1]
  end
end
local open = redis.call('HMGET', load_key, 'jobs', 'bytes')
local open_jobs, open_bytes = tonumber(open[1]) or 0, tonumber(open[2]) or 0
-- An empty pool takes any batch: a single one over the cap could otherwise never be accepted.
if jobs > 0 and open_jobs > 0 and (open_jobs + jobs > max_jobs or open_bytes + bytes > max_bytes) then
  return {'BUSY', open_jobs, open_bytes}
end
local now = now_ms()
local states = {}
for i = 4, #ARGV, STRIDE do
  local id, payload, class = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  local key = job_key(id)
  local state = redis.call('HGET', key, 'st')
  if not state then
    state = 'new'
    redis.call('HSET', key, 'st', 'q', 'p', payload, 'n', ARGV[i + 2], 'q', class, 'y', ARGV[i + 4], 'z', #payload,
               't', now, 'a', 0, 'd', 0)
    if ARGV[i + 5] ~= '0' then redis.call('HSET', key, 'v', ARGV[i + 5]) end
    if ARGV[i + 6] ~= '' then redis.call('HSET', key, 'g', ARGV[i + 6]) end
    if ARGV[i + 7] ~= '' then
      local deadline = now + tonumber(ARGV[i + 7])
      redis.call('HSET', key, 'e', deadline)
      redis.call('ZADD', prefix .. 'deadlines', deadline, id)
    end
    redis.call('RPUSH', queue_key(class), id)
  end
  states[#states + 1] = state
end
if jobs > 0 then
  redis.call('HINCRBY', load_key, 'jobs', jobs)
  redis.call('HINCRBY', load_key, 'bytes', bytes)
  redis.call('HINCRBY', load_key, 'accepted', jobs)
  wake()
end
return states
