-- Give queued jobs to a worker that holds a lease.
-- ARGV: prefix, worker id, claim number, max jobs, max samples, weights version, number of classes
-- Returns {'NOLEASE'}, or a flat list, per job: id, attempt, samples, queued ms, ms to the deadline ('' for none),
--   payload, then a list: published sample, '' or sample with a partial, its bytes, ...
-- A repeated claim number returns what that claim gave, as far as it is still held: a client library that re-sends
-- after a lost reply gets the same jobs instead of the next ones.
local worker, number = ARGV[2], ARGV[3]
local max_jobs, max_samples, version = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local SCAN = 64               -- entries one claim looks at beyond what it takes
local now = now_ms()
local worker_key = prefix .. 'worker:' .. worker
local lease = redis.call('ZSCORE', prefix .. 'workers', worker)
if not lease or tonumber(lease) <= now then return {'NOLEASE'} end

local given = {}
local function hand_over(id, f)   -- f: fields p, a, t, e, d, st, n
  local progress = {}
  if tonumber(f[5]) > 0 or redis.call('HEXISTS', job_key(id), 'kk') == 1 then
    local all = redis.call('HGETALL', job_key(id))
    for i = 1, #all, 2 do
      local sample = string.match(all[i], '^s(%d+)$')
      if sample then
        progress[#progress + 1] = sample
        progress[#progress + 1] = ''
      else
        sample = string.match(all[i], '^k(%d+)$')
        if sample then
          progress[#progress + 1] = sample
          progress[#progress + 1] = all[i + 1]
        end
      end
    end
  end
  local left = f[4] and tostring(tonumber(f[4]) - now) or ''
  for _, value in ipairs({id, f[2], f[7], tostring(now - tonumber(f[3])), left, f[1], progress}) do
    given[#given + 1] = value
  end
end

local last = redis.call('HMGET', worker_key, 'claim', 'ids')
if last[1] == number then
  for id in string.gmatch(last[2], '%x+') do
    local f = redis.call('HMGET', job_key(id), 'p', 'a', 't', 'e', 'd', 'st', 'n', 'w')
    if f[6] == 'r' and f[8] == worker then hand_over(id, f) end
  end
  return given
end

local committed = tonumber(redis.call('HGET', prefix .. 'weights', 'committed')) or 0
local ids, jobs, samples, looked = {}, 0, 0, 0

local function version_needed(id)
  local f = redis.call('HMGET', job_key(id), 'v', 'g')
  return math.max(tonumber(f[1]) or 0, f[2] and committed - tonumber(f[2]) or 0)
end

-- What becomes of an id that was taken from a queue.
local function consider(id, later)
  looked = looked + 1
  local f = redis.call('HMGET', job_key(id), 'p', 'a', 't', 'e', 'd', 'st', 'n')
  if f[6] ~= 'q' then return end               -- it was cancelled or expired while queued
  local needs = version_needed(id)
  if f[4] and tonumber(f[4]) <= now then
    fail(id, 'expired', 'its deadline passed in the queue', '', '')
  elseif version < needs then
    redis.call('ZADD', later, needs, id)       -- out of the way of those behind it
  else
    f[2] = tostring(tonumber(f[2]) + 1)
    redis.call('HSET', job_key(id), 'st', 'r', 'w', worker, 'a', f[2])
    redis.call('SADD', held_key(worker), id)
    jobs = jobs + 1
    samples = samples + tonumber(f[7]) - tonumber(f[5])
    ids[#ids + 1] = id
    hand_over(id, f)
  end
end

local function remember()
  redis.call('HSET', worker_key, 'claim', number, 'ids', table.concat(ids, ','))
  return given
end

-- One worker at a time is the ward for suspects: it lets what it holds run out, then takes them one by one.
local alone = redis.call('HGET', worker_key, 'alone')
if alone and redis.call('SISMEMBER', held_key(worker), alone) == 1 then return remember() end
if redis.call('LLEN', suspects_key) > 0 then
  local ward = prefix .. 'ward'
  if redis.call('GET', ward) == worker or redis.call('SET', ward, worker, 'NX', 'PX', 10000) then
    redis.call('PEXPIRE', ward, 10000)
    while redis.call('SCARD', held_key(worker)) == 0 do
      local id = redis.call('LINDEX', suspects_key, 0)
      if not id then break end
      if redis.call('HGET', job_key(id), 'st') == 'q' and version < version_needed(id) then
        redis.call('DEL', ward)                -- somebody with newer weights may have the turn
        break
      end
      redis.call('LPOP', suspects_key)
      consider(id, later_key(redis.call('HGET', job_key(id), 'q') or 0))
      if jobs > 0 then redis.call('HSET', worker_key, 'alone', id) end
    end
    if redis.call('SCARD', held_key(worker)) > 0 then return remember() end
  end
end

for class = 0, tonumber(ARGV[7]) - 1 do
  local queue, later = queue_key(class), later_key(class)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', later, '-inf', version, 'LIMIT', 0, max_jobs)) do
    if jobs >= max_jobs or samples >= max_samples then break end
    redis.call('ZREM', later, id)
    consider(id, later)
  end
  while jobs < max_jobs and samples < max_samples and looked < max_jobs + SCAN do
    local id = redis.call('LPOP', queue)
    if not id then break end
    consider(id, later)
  end
end
if jobs > 0 or looked >= max_jobs + SCAN then
  for class = 0, tonumber(ARGV[7]) - 1 do
    if redis.call('LLEN', queue_key(class)) > 0 then wake() break end
  end
end
return remember()
